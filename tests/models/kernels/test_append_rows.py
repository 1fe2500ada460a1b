"""Compare the GPU kernel that writes accepted rows, interpreted on the CPU, with NumPy."""

from __future__ import annotations

import jax
import numpy as np

from hydrajax.models import backend
from hydrajax.models.kernels.append_rows import append_rows


def test_writes_the_chosen_rows_only():
    rng = np.random.default_rng(0)
    caches = [rng.normal(size=(2, 3, 64, 16)).astype(np.float32) for _ in range(4)]
    blocks = [rng.normal(size=(2, 3, 9, 16)).astype(np.float32) for _ in range(4)]
    index, starts = np.array([[0, 4, 8, 8], [0, 0, 1, 2]], np.int32), np.array([0, 60], np.int32)
    found = jax.jit(lambda *args: append_rows(*args, interpret=True))(caches, blocks, index, starts)
    plain = jax.jit(backend.append_rows)(caches, blocks, index, starts)
    for cache, block, one, other in zip(caches, blocks, found, plain, strict=True):
        want = cache.copy()
        want[0, :, 0:4], want[1, :, 60:64] = block[0][:, index[0]], block[1][:, index[1]]
        np.testing.assert_array_equal(one, want)
        np.testing.assert_array_equal(other, want)
