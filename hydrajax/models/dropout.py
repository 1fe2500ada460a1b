"""Dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from hydrajax.models import platforms
from hydrajax.models.arrays import Array
from hydrajax.models.per_device import DATA, MODEL, divided


def drop(x: Float[Array, "*rows D"], rate: float, rng: Array | None) -> Float[Array, "*rows D"]:
    """Apply inverted dropout, which keeps every element's expectation; without a key, return ``x``."""
    if rng is None or rate == 0:
        return x
    keep = jax.random.bernoulli(rng, 1 - rate, x.shape)
    keep = _stored(keep) if platforms.on_tpu() and x.ndim == 3 else keep
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def _stored(keep: Bool[Array, "B T D"]) -> Bool[Array, "B T D"]:
    """Return the mask as read from memory, a bit for each element, of which every device of a mesh draws a part.

    Otherwise each device draws all of it, in every kernel that reads a product's input: for the heads of Hydra++ this
    takes as many cycles as their products (7B on eight v5e, by the compiler's estimate).
    """
    drawn = jnp.packbits(divided(keep, DATA, None, MODEL), axis=1)
    bits = jax.lax.optimization_barrier(divided(drawn, DATA, None, None))
    return jnp.unpackbits(bits, axis=1, count=keep.shape[1]).astype(bool)
