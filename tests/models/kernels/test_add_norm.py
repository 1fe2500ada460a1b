"""Compare the GPU kernel for the sum and norm of one row, interpreted on the CPU, with the plain operations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models import backend
from hydrajax.models.kernels.add_norm import add_norm


@pytest.mark.parametrize("alone", [False, True], ids=["sum", "alone"])
@pytest.mark.parametrize("width", [64, 96, 5120])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_equals_the_plain_norm(width, dtype, alone):
    rng = np.random.default_rng(width)
    x, added, scale = (jnp.asarray(rng.normal(size=width), dtype) for _ in range(3))
    inputs = x, None if alone else added, scale, 1e-5
    total, normed = add_norm(*inputs, interpret=True)
    want_total, want_normed = backend.add_norm(*inputs)
    assert total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(total, want_total)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (normed, want_normed)), rtol=2e-2)
