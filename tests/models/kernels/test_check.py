"""The check of the GPU kernels that precedes their first use, on a CPU that interprets them."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models import backend
from hydrajax.models.backend import Platform
from hydrajax.models.kernels import check


def test_the_kernels_agree_also_while_a_program_is_traced():
    found = []
    jax.make_jaxpr(lambda x: found.append(check.disagreement(interpret=True)) or x)(1.0)
    assert found == [None]


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(check, "add_norm", lambda x, added, scale, eps, interpret: (x + added, x * 1.1))
    assert check.disagreement(interpret=True).startswith("a row's norm: differs by ")


def test_where_they_fail_xla_does_the_work(monkeypatch):
    """As on a device whose compiler refuses them; a CPU's refuses all."""
    monkeypatch.setattr(backend, "_present", lambda: Platform("gpu", 1, 9.0))
    backend._kernels_agree.cache_clear()
    with pytest.warns(UserWarning, match="GPU kernels are not used.*attention: ValueError: Only interpret mode"):
        assert not backend.has_triton()
    assert not backend.has_triton()  # and says so once
    backend._kernels_agree.cache_clear()


def test_the_environment_turns_them_off(monkeypatch):
    with backend.traced_for(Platform("gpu", 1, 9.0)):
        queries = np.zeros((1, 4, 300, 64), jnp.bfloat16)
        assert backend.has_triton()
        assert backend.attends_text(queries)
        monkeypatch.setenv("HYDRAJAX_GPU_KERNELS", "0")
        assert not backend.has_triton()
        assert not backend.attends_text(queries)


@pytest.mark.parametrize(("found", "capability"), [("9.0", 9.0), ("gfx942", 0.0), (None, 0.0)])
def test_only_nvidia_s_gpus_have_a_capability(found, capability):
    device = SimpleNamespace(compute_capability=found) if found else SimpleNamespace()
    assert backend._capability(device) == capability


@pytest.mark.parametrize("platform", [Platform("cpu", 1), Platform("gpu", 2, 9.0), Platform("gpu", 1, 7.5)])
def test_who_has_none(platform):
    with backend.traced_for(platform):
        assert not backend.has_triton()
        assert backend.whole_slots(100) == 100
