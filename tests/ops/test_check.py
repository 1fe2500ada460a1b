"""The self-check of the kernels before their first use, interpreted on a CPU."""

from __future__ import annotations

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


def test_xla_is_used_if_the_kernels_fail(monkeypatch):
    """The compiler of a CPU rejects all of them, as that of an old GPU would."""
    monkeypatch.setattr(trace, "_present", lambda: Platform("gpu", 1, 9.0, present=True))
    trace._kernels_agree.cache_clear()
    with pytest.warns(UserWarning, match="GPU kernels are not used.*attention: ValueError: Only interpret mode"):
        assert not trace.has_triton()
    assert not trace.has_triton()  # without a second warning
    trace._kernels_agree.cache_clear()


def test_a_tpu_uses_xla_if_the_kernel_fails(monkeypatch):
    monkeypatch.setattr(trace, "_present", lambda: Platform("tpu", 1, present=True))
    trace._kernels_agree.cache_clear()
    with pytest.warns(UserWarning, match="TPU kernels are not used.*attention: ValueError: Only interpret mode"):
        assert not trace.has_mosaic()
    trace._kernels_agree.cache_clear()


def test_the_environment_turns_off_the_tpu_kernel(monkeypatch):
    queries = np.zeros((1, 4, 5, 64), jnp.bfloat16)
    with trace.tracing(platform=Platform("tpu", 1)):
        assert ops.here().tree_kernel(queries, 2) is tree_attention_tpu
    with trace.tracing(platform=Platform("tpu", 4)):
        assert ops.here().tree_kernel(queries, 2) is None
    monkeypatch.setenv("HYDRAJAX_TPU_KERNELS", "0")
    with trace.tracing(platform=Platform("tpu", 1)):
        assert ops.here().tree_kernel(queries, 2) is None


def test_the_environment_turns_them_off(monkeypatch):
    queries = np.zeros((1, 4, 300, 64), jnp.bfloat16)
    with trace.tracing(platform=Platform("gpu", 1, 9.0)):
        assert trace.has_triton()
        assert ops.here().text_kernel(queries)
    monkeypatch.setenv("HYDRAJAX_GPU_KERNELS", "0")
    with trace.tracing(platform=Platform("gpu", 1, 9.0)):
        assert not trace.has_triton()
        assert not ops.here().text_kernel(queries)


@pytest.mark.parametrize(("found", "capability"), [("9.0", 9.0), ("gfx942", 0.0), (None, 0.0)])
def test_only_nvidia_gpus_have_a_compute_capability(found, capability):
    device = SimpleNamespace(compute_capability=found) if found else SimpleNamespace()
    assert trace._capability(device) == capability


@pytest.mark.parametrize("platform", [Platform("cpu", 1), Platform("gpu", 2, 9.0), Platform("gpu", 1, 7.5)])
def test_platforms_without_kernels(platform):
    with trace.tracing(platform=platform):
        assert not trace.has_triton()
        assert ops.here().padded_slots(100) == 100
