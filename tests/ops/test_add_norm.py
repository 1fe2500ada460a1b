"""Compare the GPU kernel for the sum and norm of one row, interpreted on the CPU, with the plain operations."""

import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax import ops
from hydrajax.ops.gpu.add_norm import add_norm


@pytest.mark.parametrize(
    ("width", "dtype", "alone"),
    [(64, "bfloat16", False), (96, "float32", True), (96, "bfloat16", True), (5120, "float32", False)],
)
def test_equals_the_plain_norm(width, dtype, alone):
    rng = np.random.default_rng(width)
    x, added, scale = (jnp.asarray(rng.normal(size=width), dtype) for _ in range(3))
    inputs = x, None if alone else added, scale, 1e-5
    total, normed = add_norm(*inputs, interpret=True)
    want_total, want_normed = ops.add_norm(*inputs)
    assert total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(total, want_total)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (normed, want_normed)), rtol=2e-2)


def test_a_float32_scale_multiplies_before_rounding():
    """Gemma's norms: x and the result in bfloat16, 1 + scale and the product in float32."""
    rng = np.random.default_rng(96)
    x = jnp.asarray(rng.normal(size=96), jnp.bfloat16)
    scale = jnp.asarray(1 + rng.normal(size=96), jnp.float32)
    wide = np.asarray(x, np.float32)
    exact = wide / np.sqrt(np.mean(wide**2) + 1e-5) * np.asarray(scale)
    for normed in (add_norm(x, None, scale, 1e-5, interpret=True)[1], ops.add_norm(x, None, scale, 1e-5)[1]):
        assert normed.dtype == jnp.bfloat16
        # Half a unit in the last of 8 bits; a product of rounded factors would be off by more.
        np.testing.assert_allclose(np.asarray(normed, np.float32), exact, rtol=1.01 * 2**-8)
    rounded = jnp.asarray(exact / np.asarray(scale), jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)
    assert np.max(np.abs(np.asarray(rounded, np.float32) / exact - 1)) > 1.5 * 2**-8
