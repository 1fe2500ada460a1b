"""The GPU's kernel for the norm of one row, interpreted on the CPU, against the plain operations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models import backend
from hydrajax.models.kernels.one_row_norm import one_row_norm


@pytest.mark.parametrize("width", [64, 96, 5120])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_it_is_the_plain_norm(width, dtype):
    rng = np.random.default_rng(width)
    x, scale = (jnp.asarray(rng.normal(size=width), dtype) for _ in range(2))
    found = one_row_norm(x, scale, 1e-5, interpret=True)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), backend.rms_norm(x, scale, 1e-5).astype(float), rtol=1e-2)
