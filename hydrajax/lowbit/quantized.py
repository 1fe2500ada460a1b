"""Kernels in 8 and 4 bits that keep the kernel's shape: XLA widens them within the product.

On one CPU device they lie in tiles (`hydrajax.lowbit.tiles`). The lm head, and an embedding that is one, take 8 bits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax import ops
from hydrajax.errors import HydrajaxError
from hydrajax.lowbit import products as low_bit_products
from hydrajax.lowbit import tiles
from hydrajax.lowbit.kernels import few_bits
from hydrajax.lowbit.rounding import ROWS, four_bits, in_groups
from hydrajax.models.arrays import Array
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace
from hydrajax.ops.xla import with_gradient_of

LM_HEADS = ("lm_head", "embedding")


class Int8(Quantized):
    """``values * scale``: symmetric, one byte per number and a scale per output feature.

    Attributes:
        values: int8 ``[D, *features]``.
        scale: float32 ``[*features]``.
    """

    dtype, largest = jnp.int8, 127  # of a number
    in_tiles = tiles.Int8Tiles  # the class on one CPU device
    scaled_outputs = True

    values: Any  # leaves of a pytree, which transformations replace by other things than arrays
    scale: Any

    @classmethod
    def stores(cls, name):
        if trace.has_few_bits():
            return cls.in_tiles
        return super().stores(name)

    @property
    def shape(self):
        return self.values.shape

    @classmethod
    def arrays_of(cls, shape, axes):
        return {"values": (shape, cls.dtype, axes), "scale": (shape[1:], jnp.float32, axes[1:])}

    @classmethod
    def of(cls, kernel):
        """Return the nearest kernel; each output feature's largest weight becomes the largest number."""
        kernel = np.asarray(kernel)
        # In blocks of rows: float32 copies of a whole lm head would be the peak of the host's memory.
        blocks = [slice(i, i + ROWS) for i in range(0, len(kernel), ROWS)]
        largest = np.zeros(kernel.shape[1:], np.float32)
        for rows in blocks:
            np.maximum(largest, np.max(np.abs(kernel[rows].astype(np.float32)), axis=0), out=largest)
        if not np.all(np.isfinite(largest)):
            raise HydrajaxError("quantize: got a weight that is not finite, expected finite numbers")
        scale = largest / np.float32(cls.largest)
        scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # for features of zeros, or nearly
        values = np.empty(kernel.shape, cls.dtype)
        for rows in blocks:
            values[rows] = cls._rounded(kernel[rows].astype(np.float32) / scale)
        return cls(values, scale)

    @staticmethod
    def _rounded(steps: np.ndarray) -> np.ndarray:
        return np.rint(steps)

    def dequantized(self):
        return self.values.astype(jnp.float32) * self.scale

    def project(self, x, dtype):
        values = self.values.reshape(x.shape[-1], -1)
        product = low_bit_products.matmul_scaled(x.reshape(-1, x.shape[-1]), values, self.scale.reshape(-1), dtype)
        return product.reshape(*x.shape[:-1], -1)

    def project_parts(self, x):
        product = low_bit_products.matmul_scaled(x.reshape(-1, x.shape[-1]), self.values, self.scale, x.dtype)
        return product.reshape(*self.shape[1:-1], *x.shape[:-1], self.shape[-1])


class Fp8(Int8):
    """``values * scale`` with values in float8_e4m3fn, for GPUs whose products read them (`trace.has_fp8`)."""

    dtype, largest = jnp.float8_e4m3fn, 448

    @classmethod
    def stores(cls, name):
        if not trace.has_fp8():
            raise HydrajaxError(
                "quantize: got fp8, expected an NVIDIA GPU of compute capability 8.9 or higher; without --quantize, "
                "files in fp8 are widened"
            )
        return Int8.stores(name) if name in LM_HEADS else cls

    @staticmethod
    def _rounded(steps):
        return steps.astype(jnp.float8_e4m3fn)


class Int4(Quantized):
    """The numbers of `Int4Tiles` away from a CPU, in the kernel's own order, so that its axes can be sharded.

    Attributes:
        values: uint8 ``[groups, 16, *features]``: two numbers of 0 to 15 in a byte. The first 16 inputs of a group lie
            in the low bits.
        scale, offset: float16 ``[groups, *features]``. Larger groups of inputs repeat theirs.
    """

    group = few_bits.GROUP  # inputs that share a scale
    in_tiles = tiles.Int4Tiles

    values: Any
    scale: Any
    offset: Any
    shape_: tuple[int, ...]

    @classmethod
    def stores(cls, name):
        if name in LM_HEADS:
            return Int8.stores(name)
        return cls.in_tiles if trace.has_few_bits() else cls

    @classmethod
    def arrays_of(cls, shape, axes):
        (depth, *features), (first, *others) = shape, axes
        groups = -(-depth // few_bits.GROUP)
        numbers = ((groups, *features), jnp.float16, axes)
        pairs = ((groups, few_bits.GROUP // 2, *features), jnp.uint8, (first, None, *others))
        return {"values": pairs, "scale": numbers, "offset": numbers}

    @classmethod
    def of(cls, kernel):
        """Return the kernel of `Int4Tiles.of`."""
        depth, *features = kernel.shape
        values, *numbers = in_groups(np.asarray(kernel), four_bits, cls.group)
        values = np.pad(values, [(0, -depth % few_bits.GROUP), (0, 0)])
        low, high = np.split(values.reshape(-1, few_bits.GROUP, values.shape[1]), 2, axis=1)
        pairs = (low | high << 4).reshape(*low.shape[:2], *features)
        scale, offset = (np.repeat(x, cls.group // few_bits.GROUP, axis=0)[: len(pairs)] for x in numbers)
        return cls(pairs, *(x.reshape(-1, *features) for x in (scale, offset)), kernel.shape)

    def dequantized(self):
        numbers = jnp.concatenate([self.values & 15, self.values >> 4], axis=1).astype(jnp.float32)
        scale, offset = (x.astype(jnp.float32)[:, None] for x in (self.scale, self.offset))
        return (numbers * scale + offset).reshape(-1, *self.shape_[1:])[: self.shape_[0]]

    def project(self, x, dtype):
        parts = len(self.shape_) - 2
        product = self._parts(x.reshape(-1, x.shape[-1]), dtype)
        return jnp.moveaxis(product, parts, 0).reshape(*x.shape[:-1], -1)

    def project_parts(self, x):
        product = self._parts(x.reshape(-1, x.shape[-1]), x.dtype)
        return product.reshape(*self.shape_[1:-1], *x.shape[:-1], self.shape_[-1])

    def _parts(self, rows: Float[Array, "rows D"], dtype) -> Float[Array, "*parts rows f"]:
        def plain(rows, *arrays):
            kernel = type(self)(*arrays, self.shape_).dequantized().astype(rows.dtype)
            return ops.matmul_parts(rows, kernel, dtype, stored=False)

        kernel = low_bit_products.int4_kernel(len(rows), self.values.shape, rows.dtype)
        if kernel is None:
            return plain(rows, *self.arrays().values())

        @with_gradient_of(plain)
        def product(rows, *arrays):
            padded = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % few_bits.GROUP)])
            return kernel(padded, *arrays, dtype)

        return product(rows, *self.arrays().values())


# In 8 bits only tiles have groups.
Int8By64 = tiles.with_groups(Int8, 64, in_tiles=tiles.Int8TilesBy64)
Int8By128 = tiles.with_groups(Int8, 128, in_tiles=tiles.Int8TilesBy128)
Int4By64 = tiles.with_groups(Int4, 64, in_tiles=tiles.Int4TilesBy64)
Int4By128 = tiles.with_groups(Int4, 128, in_tiles=tiles.Int4TilesBy128)
