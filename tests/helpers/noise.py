"""Random parameters for tests."""

import jax
import jax.numpy as jnp
import numpy as np


def noise(shapes, seed: int):
    """Return random leaves of these shapes with std 0.3, not 0.02, so that logits differ by much more than rounding.

    Vectors are centred at 1. Fresh draft heads are identities and would hide most errors.
    """
    random = np.random.default_rng(seed)

    def leaf(shape):
        drawn = random.standard_normal(shape).astype(np.float32)
        return jnp.asarray(1 + 0.2 * drawn if len(shape) == 1 else 0.3 * drawn)

    return jax.tree.map(lambda x: leaf(x.shape), shapes)


def draft_noise(drafter, base, seed: int):
    """Return `noise` as the parameters of a drafter for this base."""
    return noise(jax.eval_shape(lambda: drafter.init(jax.random.key(0), base)), seed)
