"""Random parameters for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def noise(shapes, seed: int):
    """Random leaves of these shapes: std 0.3 in place of 0.02, so that logits differ by much more than rounding.

    Vectors are scattered around 1. A fresh draft head is an identity and would hide most mistakes; noise does not.
    """
    random = np.random.default_rng(seed)

    def leaf(shape):
        drawn = random.standard_normal(shape).astype(np.float32)
        return jnp.asarray(1 + 0.2 * drawn if len(shape) == 1 else 0.3 * drawn)

    return jax.tree.map(lambda x: leaf(x.shape), shapes)
