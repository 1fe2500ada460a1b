"""Rows of x as two digits of 8 bits, so that they can be multiplied with int8 weights as integers."""

import jax.numpy as jnp
from jaxtyping import Float, Int8

from hydrajax.models.arrays import Array

DIGIT = 254  # steps of the second digit in one of the first


def digits(x: Float[Array, "R D"]) -> tuple[Int8[Array, "R D"], Int8[Array, "R D"], Float[Array, "R 1"]]:
    """Return two digits and a scale of each row: ``x = (first + second / 254) * scale``, to 1 / 64,516 of its largest
    number.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / 127
    first = jnp.rint(x / scale)
    second = jnp.rint((x / scale - first) * DIGIT)
    return first.astype(jnp.int8), second.astype(jnp.int8), scale
