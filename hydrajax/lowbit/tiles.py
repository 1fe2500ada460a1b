"""Kernels of products in 8 and 4 bits in tiles for our own kernels on one CPU device, which round x to 8 bits too.

See `hydrajax.lowbit.kernels.few_bits`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from hydrajax.lowbit.kernels import few_bits
from hydrajax.lowbit.rounding import eight_bits, four_bits, in_groups
from hydrajax.models.arrays import Array
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace
from hydrajax.ops.xla import with_gradient_of

COLUMNS_AT_ONCE = 8192  # of a matrix that is quantised, whole tiles


class Tiles(Quantized):
    """A kernel whose features are the columns of `few_bits.to_tiles`. It is not sharded."""

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
        values: int8 (`few_bits.tile_shape`).
        scale: float16 ``[tiles, groups, 64]`` (`few_bits.per_group`).
    """

    group = few_bits.GROUP  # inputs that share a scale

    values: Any
    scale: Any
    shape_: tuple[int, ...]

    @classmethod
    def arrays_of(cls, shape, axes):
        size = shape[0], math.prod(shape[1:])
        return {
            "values": (few_bits.tile_shape(*size), jnp.int8, (None,) * 5),
            "scale": (few_bits.scale_shape(*size, cls.group), jnp.float16, (None,) * 3),
        }

    @classmethod
    def of_columns(cls, kernel):
        """Return the nearest kernel; the largest number of each group becomes 127."""
        values, scale = in_groups(kernel, eight_bits, cls.group)
        return cls(few_bits.to_tiles(values), few_bits.per_group(scale), kernel.shape)

    @staticmethod
    def widened(depth, width, values, scale):
        scale = few_bits.for_tiles(scale.astype(jnp.float32), values.shape[1], axis=1)[:, :, None, :, None]
        return few_bits.from_tiles(values.astype(jnp.float32) * scale, depth, width)

    def columns(self, at):
        tile, place = at // few_bits.COLUMNS, at % few_bits.COLUMNS
        scale = self.scale[tile, :, place].astype(jnp.float32)  # [*rows, scales]
        scale = few_bits.for_tiles(scale, self.values.shape[1], axis=-1)[..., None, None]
        rows = self.values[tile, :, :, place].astype(jnp.float32) * scale  # [*rows, groups, 8, 4]
        return rows.reshape(*at.shape, math.prod(rows.shape[at.ndim :]))[..., : self.shape_[0]]

    def select(self, columns, dtype):
        values, scale = few_bits.select(self.values, self.scale, columns)
        return type(self)(values, scale, (self.shape_[0], len(columns)))


class Int4Tiles(Tiles):
    """``values * scale + offset`` with a scale and an offset for each 32 inputs of an output, like GGUF's Q4_1.

    Layers of other programs' files (`of_numbers`) are ``(values - offset) * scale``, with groups of their own. They
    keep their zeros, a byte each: float16 cannot hold ``-zero * scale``, and float32 offsets would take four.

    Attributes:
        values: uint8, two numbers of 0 to 15 in a byte (`few_bits.tile_shape`).
        scale: float16 (`few_bits.scale_shape`), or float32 where a file's scales do not fit.
        offset: float16 with the scale's shape, or uint8 zeros.
        order: int32 ``[D]``, the kernel's rows in the order of the tiles, which makes groups of rows that are apart
            consecutive (GPTQ's ``desc_act``). x is reordered before the product. None: the kernel's own order.
    """

    group = few_bits.GROUP  # inputs that share a scale, where a float kernel is quantised

    values: Any
    scale: Any
    offset: Any
    shape_: tuple[int, ...]
    order: Any = None

    @classmethod
    def arrays_of(cls, shape, axes):
        size = shape[0], math.prod(shape[1:])
        numbers = (few_bits.scale_shape(*size, cls.group), jnp.float16, (None,) * 3)
        values = (few_bits.tile_shape(*size, per_byte=2), jnp.uint8, (None,) * 5)
        return {"values": values, "scale": numbers, "offset": numbers}

    @classmethod
    def of_columns(cls, kernel):
        """Return the kernel that keeps the least and largest number of each group; what was in Q4_1 stays the same."""
        values, scale, offset = in_groups(kernel, four_bits, cls.group)
        return cls(_in_pairs(values), few_bits.per_group(scale), few_bits.per_group(offset), kernel.shape)

    @classmethod
    def of_numbers(
        cls,
        numbers: UInt8[np.ndarray, "D F"],
        scale: Float[np.ndarray, "groups F"],
        zeros: UInt8[np.ndarray, "groups F"],
        shape: tuple[int, ...],
        order: Int[np.ndarray, " D"] | None = None,
    ) -> Int4Tiles:
        """Return the kernel ``(numbers - zeros) * scale`` without rounding.

        Args:
            numbers: 0 to 15.
            scale: For 32, 64 or 128 inputs each, of any float type.
            zeros: What is subtracted from the numbers.
            shape: The kernel's, ``(D, *features)``.
            order: Row i of the numbers is row ``order[i]`` of the kernel; None for row i.
        """
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16)
        scale = half if np.array_equal(half.astype(np.float32), scale) else scale.astype(np.float32)
        return cls(_in_pairs(numbers), few_bits.per_group(scale), few_bits.per_group(zeros), shape, order)

    @staticmethod
    def widened(depth, width, values, scale, offset):
        tiles = jnp.concatenate([values & 15, values >> 4], axis=2).astype(jnp.float32)
        has_zeros = offset.dtype == jnp.uint8
        scale, offset = (
            few_bits.for_tiles(numbers.astype(jnp.float32), tiles.shape[1], axis=1)[:, :, None, :, None]
            for numbers in (scale, offset)
        )
        wide = (tiles - offset) * scale if has_zeros else tiles * scale + offset
        return few_bits.from_tiles(wide, depth, width)


def with_groups(kind: type[Quantized], size: int, **others: Any) -> Any:
    """Return a type like this one with a scale, and an offset if it has some, for each ``size`` inputs."""
    described = {"group": size, "__module__": kind.__module__, "__doc__": f"Groups of {size} inputs."}
    return type(f"{kind.__name__}By{size}", (kind,), described | others)


Int8TilesBy64, Int8TilesBy128 = (with_groups(Int8Tiles, size) for size in (64, 128))
Int4TilesBy64, Int4TilesBy128 = (with_groups(Int4Tiles, size) for size in (64, 128))


def _in_pairs(numbers: UInt8[np.ndarray, "D F"]) -> UInt8[np.ndarray, "tiles groups 4 64 4"]:
    """Return numbers of 0 to 15 in tiles, two in a byte."""
    tiles, half = few_bits.to_tiles(numbers), few_bits.STEPS // 2
    return tiles[:, :, :half] | tiles[:, :, half:] << 4
