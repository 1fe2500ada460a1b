"""A weight type of another package: one class and one entry point, and no line of ours."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hydrajax
from hydrajax import plugins
from hydrajax.models.weights import Quantized


class Half(Quantized):
    """Kernels in float16, which are widened in every product."""

    values: Any

    @classmethod
    def arrays_of(cls, shape, axes):
        return {"values": (shape, jnp.float16, axes)}

    @classmethod
    def of(cls, kernel):
        return cls(np.asarray(kernel, np.float16))

    @property
    def shape(self):
        return self.values.shape

    def dequantized(self):
        return self.values.astype(jnp.float32)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package that has the type above as ``half``."""
    info = tmp_path / "halves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hydrajax.weights]\nhalf = {__name__}:Half\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins._installed.cache_clear()
    plugins.declared.cache_clear()
    yield
    plugins._installed.cache_clear()
    plugins.declared.cache_clear()


def test_a_type_of_another_package(installed):
    m = hydrajax.load("shipped", "hydra++", quantize="half")
    kernels = jax.tree.leaves(m.params.base, is_leaf=lambda x: isinstance(x, Half))
    assert sum(isinstance(x, Half) for x in kernels) == 4 * m.config.n_layers + (not m.config.tied_lm_head)
    assert "float32 with half weights" in repr(m)
    prompts = ["def area(width, height):", "class Stack:"]
    found = m.generate(prompts, tree="chain-3", max_new_tokens=24)

    plain = hydrajax.load("shipped", "none")
    widened = jax.tree.map(
        lambda x: x.dequantized() if isinstance(x, Half) else x, m.params.base, is_leaf=lambda x: isinstance(x, Half)
    )
    assert jax.tree.structure(widened) == jax.tree.structure(plain.params.base)
    expected = dataclasses.replace(plain, params=plain.params._replace(base=widened))
    expected = expected.generate(prompts, max_new_tokens=24)
    assert [one.output_ids for one in found] == [one.output_ids for one in expected]
    assert all(one.steps < 24 for one in found)
