"""Weights of 8 and 4 bits in tiles of 64 columns and 32 rows, which a CPU kernel reads in order (`few_bits.cc`).

A scale serves one, two or four tiles of a column.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float16, Int8, Shaped

from hydrajax.models.arrays import Array

GROUP = 32  # rows of a tile, whose part of x has a scale of its own
COLUMNS = 64
STEPS = GROUP // 4  # an instruction sums four products
GROUPS = (32, 64, 128)  # inputs that may share a scale


def tile_shape(depth: int, width: int, per_byte: int = 1) -> tuple[int, ...]:
    """Return the shape of a weight ``[depth, width]`` in tiles: ``[tiles of columns, groups, steps, 64, 4]``.

    With two numbers in a byte, the second half of the steps lies in the high bits of the first half.
    """
    return (-(-width // COLUMNS), -(-depth // GROUP), STEPS // per_byte, COLUMNS, 4)


def scale_shape(depth: int, width: int, group: int = GROUP) -> tuple[int, ...]:
    """Return the shape of the scales of a weight ``[depth, width]``: ``[tiles of columns, groups, 64]``."""
    return (-(-width // COLUMNS), -(-depth // group), COLUMNS)


def for_tiles(numbers: Shaped[Array, "..."], n_tiles: int, axis: int) -> Shaped[Array, "..."]:
    """Return the scales of groups along ``axis`` as one of each of ``n_tiles`` tiles."""
    n_scales = numbers.shape[axis]
    per_scale = next(size // GROUP for size in GROUPS if -(-n_tiles // (size // GROUP)) == n_scales)
    if per_scale == 1:
        return numbers
    return jax.lax.slice_in_dim(jnp.repeat(numbers, per_scale, axis=axis), 0, n_tiles, axis=axis)


def to_tiles(values: Shaped[np.ndarray, "D F"]) -> Shaped[np.ndarray, "tiles groups 8 64 4"]:
    """Return a matrix in tiles, filled up with zeros."""
    tiles, groups, *_ = shape = tile_shape(*values.shape)
    whole = np.zeros((groups * GROUP, tiles * COLUMNS), values.dtype)
    whole[: values.shape[0], : values.shape[1]] = values
    return np.ascontiguousarray(whole.reshape(groups, STEPS, 4, tiles, COLUMNS).transpose(3, 0, 1, 4, 2)).reshape(shape)


def from_tiles(tiles: Shaped[Array, "tiles groups 8 64 4"], depth: int, width: int) -> Shaped[Array, "D F"]:
    """Return the matrix of `to_tiles`."""
    return tiles.transpose(1, 2, 4, 0, 3).reshape(-1, tiles.shape[0] * COLUMNS)[:depth, :width]


def per_group(values: Shaped[np.ndarray, "groups F"]) -> Shaped[np.ndarray, "tiles groups 64"]:
    """Return a number of each group and column in the tiles' order."""
    groups, width = values.shape
    whole = np.zeros((groups, -(-width // COLUMNS) * COLUMNS), values.dtype)
    whole[:, :width] = values
    return np.ascontiguousarray(whole.reshape(groups, -1, COLUMNS).swapaxes(0, 1))


def select(
    tiles: Int8[Array, "tiles groups 8 64 4"], scales: Float16[Array, "tiles scales 64"], columns: np.ndarray
) -> tuple[Int8[Array, "tiles_ groups 8 64 4"], Float16[Array, "tiles_ scales 64"]]:
    """Return some columns in tiles, and their scales."""
    filled = np.resize(columns, -(-len(columns) // COLUMNS) * COLUMNS)
    tile, place = filled // COLUMNS, filled % COLUMNS
    picked = tiles[tile, :, :, place]  # [n, groups, 8, 4]
    # XLA moves neither a gather's copy nor a transposition out of a loop, but a conversion with both.
    fours = jax.lax.bitcast_convert_type(picked, jnp.int32).reshape(-1, COLUMNS, *picked.shape[1:-1])
    of_columns = scales[tile, :, place].reshape(-1, COLUMNS, scales.shape[1])
    return jax.lax.bitcast_convert_type(fours.transpose(0, 2, 3, 1), jnp.int8), of_columns.swapaxes(1, 2)
