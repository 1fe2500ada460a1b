"""Keys and values as a cache stores them: in the model's dtype, or in fewer bits."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Int8

from hydrajax.models.arrays import Array, DType

KV_CACHES = ("bfloat16", "int8")  # by the user's name
LARGEST = 127


class Int8Vectors(NamedTuple):
    """Vectors in 8 bits: ``codes * scales``, with a scale per vector.

    Attributes:
        codes: int8 ``[B, n_kv_heads, S, head_dim]``, from -127 to 127.
        scales: float32 ``[B, n_kv_heads, S, 1]``.
    """

    codes: Int8[Array, "B kv S H"]
    scales: Float[Array, "B kv S 1"]

    @classmethod
    def of(cls, vectors: Float[Array, "B kv S H"]) -> Int8Vectors:
        """Round vectors; their largest number becomes 127."""
        wide = vectors.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / LARGEST
        codes = jnp.round(wide / jnp.where(scales > 0, scales, 1.0))
        return cls(codes.astype(jnp.int8), scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> DType:
        return self.codes.dtype

    def widened(self, dtype: DType) -> Float[Array, "B kv S H"]:
        """Return the vectors as one array."""
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)


Vectors = Float[Array, "B kv S H"] | Int8Vectors
# Keys and values of one layer, each [B, n_kv_heads, slots, head_dim]; of latent attention one array for both.
KeyValue = tuple[Vectors, Vectors] | tuple[Vectors]


def rounded(vectors: Float[Array, "B kv S H"], kv_cache: str) -> Vectors:
    """Return keys or values as a cache of this type stores them."""
    return Int8Vectors.of(vectors) if kv_cache == "int8" else vectors.astype(jnp.bfloat16)


def empty(shape: tuple[int, ...], dtype: DType, kv_cache: str | None) -> Vectors:
    """Return zeros in the form of `rounded`, in ``dtype`` without a type of cache."""
    if kv_cache == "int8":
        return Int8Vectors(jnp.zeros(shape, jnp.int8), jnp.zeros((*shape[:-1], 1), jnp.float32))
    return jnp.zeros(shape, dtype if kv_cache is None else jnp.bfloat16)


def widened(vectors: Vectors, dtype: DType) -> Float[Array, "B kv S H"]:
    """Return keys or values as one array of ``dtype``."""
    return vectors.widened(dtype) if isinstance(vectors, Int8Vectors) else vectors.astype(dtype)


def in_parts(vectors: Vectors, dtype: DType) -> tuple[Float[Array, "B kv S H"], Float[Array, "B kv 1 S"] | None]:
    """Return vectors in at least ``dtype``'s precision and None, or the codes of 8-bit vectors and their scales.

    A matmul with codes is multiplied by the scales afterwards: codes are exact also in bfloat16.
    """
    if isinstance(vectors, Int8Vectors):
        return vectors.codes.astype(dtype), vectors.scales.swapaxes(2, 3)
    return vectors.astype(jnp.promote_types(vectors.dtype, dtype)), None
