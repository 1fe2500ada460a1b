"""Dropout."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from hydrajax.models import platforms
from hydrajax.models.arrays import Array
from hydrajax.models.per_device import DATA, MODEL, divided
from hydrajax.models.sequence_parallel import divides_tokens


def drop(
    x: Float[Array, "*rows D"], rate: float, rng: Array | None, division: Callable[[Array], Array] | None = None
) -> Float[Array, "*rows D"]:
    """Apply inverted dropout, which keeps every element's expectation; without a key, return ``x`` as it is.

    Args:
        x: The activations.
        rate: The share of elements to drop.
        rng: The key, on which alone the mask depends.
        division: How devices divide ``x`` (`hydrajax.models.sequence_parallel`); None: each has all of it.
    """
    x = x if division is None else division(x)
    if rng is None or rate == 0:
        return x
    keep = jax.random.bernoulli(rng, 1 - rate, x.shape)
    if platforms.on_tpu() and x.ndim == 3:
        # A byte for each element is little where the devices divide them, and read at once.
        keep = jax.lax.optimization_barrier(division(keep)) if division and divides_tokens(x) else _stored(keep)
    dropped = jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
    return dropped if division is None else division(dropped)


def _stored(keep: Bool[Array, "B T D"]) -> Bool[Array, "B T D"]:
    """Return the mask as read from memory, a bit for each element, of which every device of a mesh draws a part.

    Otherwise each device draws all of it, in every kernel that reads a product's input.
    """
    drawn = jnp.packbits(divided(keep, DATA, None, MODEL), axis=1)
    bits = jax.lax.optimization_barrier(divided(drawn, DATA))
    return jnp.unpackbits(bits, axis=1, count=keep.shape[1]).astype(bool)
