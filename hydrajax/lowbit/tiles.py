"""Kernels of products in tiles for our own kernels on one CPU device, which round x to 8 bits too; those in 8 bits.

See `hydrajax.lowbit.kernels.few_bits`; `hydrajax.lowbit.int4_tiles` has those in 4 bits.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax.lowbit.kernels import few_bits, tile_layout
from hydrajax.lowbit.rounding import eight_bits, in_groups
from hydrajax.models.arrays import Array
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace
from hydrajax.ops.xla import with_gradient_of

COLUMNS_AT_ONCE = 8192  # of a matrix that is quantised, whole tiles


class Tiles(Quantized):
    """A kernel whose features are the columns of `tile_layout.to_tiles`. It is not sharded."""

    @classmethod
    @abc.abstractmethod
    def of_columns(cls, kernel: np.ndarray) -> Tiles:
        """Quantise a kernel, or some columns of a matrix."""

    @staticmethod
    @abc.abstractmethod
    def widened(depth: int, width: int, *arrays: Array) -> Float[Array, "D F"]:
        """Return the kernel of these arrays in float32."""

    @classmethod
    def of(cls, kernel):
        if len(kernel.shape) > 2 or kernel.shape[1] <= COLUMNS_AT_ONCE:
            return cls.of_columns(np.asarray(kernel))
        # Some columns at a time: copies of a whole lm head would be the peak of the host's memory.
        width = kernel.shape[1]
        parts = [cls.of_columns(kernel[:, at : at + COLUMNS_AT_ONCE]) for at in range(0, width, COLUMNS_AT_ONCE)]
        arrays = {name: np.concatenate([part.arrays()[name] for part in parts]) for name in parts[0].arrays()}
        return dataclasses.replace(parts[0], **arrays, shape_=kernel.shape)

    order = None  # the kernel's rows in the order of its groups, int32 [D]; None: their own

    def numbers(self) -> list[Array]:
        """Return the arrays without the order."""
        return [array for name, array in self.arrays().items() if name != "order"]

    def dequantized(self):
        depth, *features = self.shape_
        kernel = self.widened(depth, math.prod(features), *self.numbers()).reshape(self.shape_)
        return kernel if self.order is None else kernel[jnp.argsort(self.order)]

    def project(self, x, dtype):
        depth, width = x.shape[-1], math.prod(self.shape_[1:])

        def plain(rows, *arrays):
            return rows @ self.widened(depth, width, *arrays)

        @with_gradient_of(plain)
        def kernel(rows, *arrays):
            return few_bits.matmul(rows, width, *arrays)

        product = kernel if trace.has_few_bits() else plain
        rows = x.reshape(-1, depth).astype(jnp.float32)
        rows = rows if self.order is None else jnp.take(rows, self.order, axis=1, mode="clip")
        return product(rows, *self.numbers()).reshape(*x.shape[:-1], -1).astype(dtype)

    def project_pairs(self, x, experts, dtype):
        if not trace.has_few_bits():
            return None
        rows, width = x.astype(jnp.float32), math.prod(self.shape_[1:])
        return few_bits.matmul_experts(rows, experts, width, *self.arrays().values()).astype(dtype)


class Int8Tiles(Tiles):
    """``values * scale`` with a scale for each 32 inputs of an output, like GGUF's Q8_0.

    Attributes:
        values: int8 (`tile_layout.tile_shape`).
        scale: float16 ``[tiles, groups, 64]`` (`tile_layout.per_group`).
    """

    group = tile_layout.GROUP  # inputs that share a scale

    values: Any
    scale: Any
    shape_: tuple[int, ...]

    @classmethod
    def arrays_of(cls, shape, axes):
        size = shape[0], math.prod(shape[1:])
        return {
            "values": (tile_layout.tile_shape(*size), jnp.int8, (None,) * 5),
            "scale": (tile_layout.scale_shape(*size, cls.group), jnp.float16, (None,) * 3),
        }

    @classmethod
    def of_columns(cls, kernel):
        """Return the nearest kernel; the largest number of each group becomes 127."""
        values, scale = in_groups(kernel, eight_bits, cls.group)
        return cls(tile_layout.to_tiles(values), tile_layout.per_group(scale), kernel.shape)

    @staticmethod
    def widened(depth, width, values, scale):
        scale = tile_layout.for_tiles(scale.astype(jnp.float32), values.shape[1], axis=1)[:, :, None, :, None]
        return tile_layout.from_tiles(values.astype(jnp.float32) * scale, depth, width)

    def split(self, count: int):
        """Return kernels of ``count`` equal parts of the features, side by side as experts'; parts are whole tiles."""
        parts = {name: array.reshape(count, -1, *array.shape[1:]) for name, array in self.arrays().items()}
        return dataclasses.replace(self, **parts, shape_=(self.shape_[0], self.shape_[1] // count))

    def columns(self, at):
        tile, place = at // tile_layout.COLUMNS, at % tile_layout.COLUMNS
        scale = self.scale[tile, :, place].astype(jnp.float32)  # [*rows, scales]
        scale = tile_layout.for_tiles(scale, self.values.shape[1], axis=-1)[..., None, None]
        rows = self.values[tile, :, :, place].astype(jnp.float32) * scale  # [*rows, groups, 8, 4]
        return rows.reshape(*at.shape, math.prod(rows.shape[at.ndim :]))[..., : self.shape_[0]]

    def select(self, columns, dtype):
        values, scale = tile_layout.select(self.values, self.scale, columns)
        return type(self)(values, scale, (self.shape_[0], len(columns)))


def with_groups(kind: type[Quantized], size: int, **others: Any) -> Any:
    """Return a type like this one with a scale, and an offset if it has some, for each ``size`` inputs."""
    described = {"group": size, "__module__": kind.__module__, "__doc__": f"Groups of {size} inputs."}
    return type(f"{kind.__name__}By{size}", (kind,), described | others)


Int8TilesBy64, Int8TilesBy128 = (with_groups(Int8Tiles, size) for size in (64, 128))
