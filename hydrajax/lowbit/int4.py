"""Kernels in 4 bits that keep the kernel's shape (`hydrajax.lowbit.quantized`)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax import ops
from hydrajax.lowbit import int4_tiles, products
from hydrajax.lowbit.kernels import tile_layout
from hydrajax.lowbit.quantized import LM_HEADS, Int8
from hydrajax.lowbit.rounding import four_bits, in_groups
from hydrajax.lowbit.tiles import with_groups
from hydrajax.models.arrays import Array
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace
from hydrajax.ops.xla import with_gradient_of


class Int4(Quantized):
    """The numbers of `Int4Tiles` away from a CPU, in the kernel's own order, so that its axes can be sharded.

    Attributes:
        values: uint8 ``[groups, 16, *features]``: two numbers of 0 to 15 in a byte. The first 16 inputs of a group lie
            in the low bits.
        scale, offset: float16 ``[groups, *features]``. Larger groups of inputs repeat theirs.
    """

    group = tile_layout.GROUP  # inputs that share a scale
    in_tiles = int4_tiles.Int4Tiles

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
        groups = -(-depth // tile_layout.GROUP)
        numbers = ((groups, *features), jnp.float16, axes)
        pairs = ((groups, tile_layout.GROUP // 2, *features), jnp.uint8, (first, None, *others))
        return {"values": pairs, "scale": numbers, "offset": numbers}

    @classmethod
    def of(cls, kernel):
        """Return the kernel of `Int4Tiles.of`."""
        depth, *features = kernel.shape
        values, *numbers = in_groups(np.asarray(kernel), four_bits, cls.group)
        values = np.pad(values, [(0, -depth % tile_layout.GROUP), (0, 0)])
        low, high = np.split(values.reshape(-1, tile_layout.GROUP, values.shape[1]), 2, axis=1)
        pairs = (low | high << 4).reshape(*low.shape[:2], *features)
        scale, offset = (np.repeat(x, cls.group // tile_layout.GROUP, axis=0)[: len(pairs)] for x in numbers)
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

        kernel = products.int4_kernel(len(rows), self.values.shape, rows.dtype)
        if kernel is None:
            return plain(rows, *self.arrays().values())

        @with_gradient_of(plain)
        def product(rows, *arrays):
            padded = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % tile_layout.GROUP)])
            return kernel(padded, *arrays, dtype)

        return product(rows, *self.arrays().values())


Int4By64 = with_groups(Int4, 64, in_tiles=int4_tiles.Int4TilesBy64)


Int4By128 = with_groups(Int4, 128, in_tiles=int4_tiles.Int4TilesBy128)
