"""What the backend does with a matmul precision that XLA ignores on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hydrajax.models import backend

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends round by themselves")


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_inputs_and_gradients_are_rounded_and_sums_are_not():
    rng = np.random.default_rng(0)
    a, b, slope = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 70, 300), (2, 300, 90), (2, 70, 90)))

    def product(a, b):
        return backend.contract("bij,bjk->bik", a, b, jnp.float32)

    with jax.default_matmul_precision("bfloat16"):
        out, gradient = jax.vjp(product, a, b)
        to_a, to_b = gradient(slope)
    np.testing.assert_allclose(out, rounded(a) @ rounded(b), atol=1e-4)
    np.testing.assert_allclose(to_a, rounded(slope) @ rounded(b).swapaxes(1, 2), atol=1e-4)
    np.testing.assert_allclose(to_b, rounded(a).swapaxes(1, 2) @ rounded(slope), atol=1e-4)
    # Without the setting nothing is rounded: the difference would be a hundred times as large.
    np.testing.assert_allclose(product(a, b), a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)
