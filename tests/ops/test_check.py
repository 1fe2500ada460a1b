"""The self-check of the kernels before their first use, interpreted on a CPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax import ops
from hydrajax.ops import check, trace
from hydrajax.ops.tpu import tree_attention as tree_attention_tpu
from hydrajax.ops.trace import Platform


@pytest.mark.parametrize("device", ["GPU", pytest.param("TPU", marks=pytest.mark.slow)])
def test_the_check_passes_during_tracing(device):
    found = []
    jax.make_jaxpr(lambda x: found.append(check.disagreement(device, interpret=True)) or x)(1.0)
    assert found == [None]


def test_the_check_names_a_wrong_kernel(monkeypatch):
    monkeypatch.setattr(check, "add_norm", lambda x, added, scale, eps, interpret: (x + added, x * 1.1))
    assert check.disagreement("GPU", interpret=True).startswith("a row's norm: differs by ")


@pytest.mark.parametrize(
    ("platform", "used"),
    [(Platform("gpu", 1, 9.0, present=True), trace.has_triton), (Platform("tpu", 1, present=True), trace.has_mosaic)],
    ids=["GPU", "TPU"],
)
def test_xla_is_used_if_the_kernels_fail(monkeypatch, platform, used):
    """The compiler of a CPU rejects all of them, as that of an old GPU would."""
    monkeypatch.setattr(trace, "_present", lambda: platform)
    trace._kernels_agree.cache_clear()
    with pytest.warns(UserWarning, match="PU kernels are not used.*attention: ValueError: Only interpret mode"):
        assert not used()
    assert not used()  # without a second warning
    trace._kernels_agree.cache_clear()


def test_the_environment_turns_kernels_off(monkeypatch):
    def uses_of(platform, tokens):
        with trace.tracing(platform=platform):
            queries = np.zeros((1, 4, tokens, 64), jnp.bfloat16)
            return trace.has_triton(), ops.here().text_kernel(queries), ops.here().tree_kernel(queries, 2)

    gpu, tpu = Platform("gpu", 1, 9.0), Platform("tpu", 1)
    assert uses_of(gpu, 300)[0]
    assert uses_of(gpu, 300)[1]
    assert uses_of(tpu, 5)[2] is tree_attention_tpu
    assert uses_of(tpu.replace(devices=4), 5)[2] is None
    monkeypatch.setenv("HYDRAJAX_GPU_KERNELS", "0")
    monkeypatch.setenv("HYDRAJAX_TPU_KERNELS", "0")
    assert not any(uses_of(Platform("gpu", 1, 9.0), 300)[:2])
    assert uses_of(Platform("tpu", 1), 5)[2] is None


def test_only_nvidia_gpus_have_a_compute_capability():
    assert trace._capability(SimpleNamespace(compute_capability="9.0")) == 9.0
    assert trace._capability(SimpleNamespace(compute_capability="gfx942")) == 0.0
    assert trace._capability(SimpleNamespace()) == 0.0


def test_platforms_without_kernels():
    for platform in (Platform("cpu", 1), Platform("gpu", 2, 9.0), Platform("gpu", 1, 7.5)):
        with trace.tracing(platform=platform):
            assert not trace.has_triton()
            assert ops.here().padded_slots(100) == 100
