"""Kernels in 4 bits in tiles (`hydrajax.lowbit.tiles`)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from hydrajax.lowbit.kernels import tile_layout
from hydrajax.lowbit.rounding import four_bits, in_groups
from hydrajax.lowbit.tiles import Tiles, with_groups


class Int4Tiles(Tiles):
    """``values * scale + offset`` with a scale and an offset for each 32 inputs of an output, like GGUF's Q4_1.

    Layers of other programs' files (`of_numbers`) are ``(values - offset) * scale``, with groups of their own. They
    keep their zeros, a byte each: float16 cannot hold ``-zero * scale``, and float32 offsets would take four.

    Attributes:
        values: uint8, two numbers of 0 to 15 in a byte (`tile_layout.tile_shape`).
        scale: float16 (`tile_layout.scale_shape`), or float32 where a file's scales do not fit.
        offset: float16 with the scale's shape, or uint8 zeros.
        order: int32 ``[D]``, the kernel's rows in the order of the tiles, which makes groups of rows that are apart
            consecutive (GPTQ's ``desc_act``). x is reordered before the product. None: the kernel's own order.
    """

    group = tile_layout.GROUP  # inputs that share a scale, where a float kernel is quantised

    values: Any
    scale: Any
    offset: Any
    shape_: tuple[int, ...]
    order: Any = None

    @classmethod
    def arrays_of(cls, shape, axes):
        size = shape[0], math.prod(shape[1:])
        numbers = (tile_layout.scale_shape(*size, cls.group), jnp.float16, (None,) * 3)
        values = (tile_layout.tile_shape(*size, per_byte=2), jnp.uint8, (None,) * 5)
        return {"values": values, "scale": numbers, "offset": numbers}

    @classmethod
    def of_columns(cls, kernel):
        """Return the kernel that keeps the least and largest number of each group; what was in Q4_1 stays the same."""
        values, scale, offset = in_groups(kernel, four_bits, cls.group)
        return cls(in_pairs(values), tile_layout.per_group(scale), tile_layout.per_group(offset), kernel.shape)

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
        return cls(in_pairs(numbers), tile_layout.per_group(scale), tile_layout.per_group(zeros), shape, order)

    @staticmethod
    def widened(depth, width, values, scale, offset):
        tiles = jnp.concatenate([values & 15, values >> 4], axis=2).astype(jnp.float32)
        has_zeros = offset.dtype == jnp.uint8
        scale, offset = (
            tile_layout.for_tiles(numbers.astype(jnp.float32), tiles.shape[1], axis=1)[:, :, None, :, None]
            for numbers in (scale, offset)
        )
        wide = (tiles - offset) * scale if has_zeros else tiles * scale + offset
        return tile_layout.from_tiles(wide, depth, width)


Int4TilesBy64, Int4TilesBy128 = (with_groups(Int4Tiles, size) for size in (64, 128))


def in_pairs(numbers: UInt8[np.ndarray, "D F"]) -> UInt8[np.ndarray, "tiles groups 4 64 4"]:
    """Return numbers of 0 to 15 in tiles, two in a byte."""
    tiles, half = tile_layout.to_tiles(numbers), tile_layout.STEPS // 2
    return tiles[:, :, :half] | tiles[:, :, half:] << 4
