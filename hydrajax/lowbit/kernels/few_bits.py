"""CPU kernels for products with weights of 8 and 4 bits (`few_bits.cc`).

Each row of x is rounded to 8 bits in groups of 32 numbers, of which the largest becomes 127; integers are multiplied
and summed within a group, by AMX, AVX-512 with VNNI (`few_bits_512.h`), AVX-VNNI or AVX2 (`few_bits_256.h`) where the
CPU has them. A row's result does not depend on the number of rows or on these instructions, to the last bit.

Weights lie in tiles of 64 columns and 32 rows, so that a kernel reads memory in order: `to_tiles`. A scale serves one,
two or four tiles of a column.

HYDRAJAX_PLAIN_CPU_KERNELS in the environment chooses the code: ``avx512vnni``, ``avxvnni``, ``avx2``, or ``1`` for that
of CPUs without these instructions. With any value AMX is not used.

AMX multiplies 6 rows or more (int8) and 12 or more (int4). Sums of a tile are stored while the next ones are
multiplied: stored at once they take twice as long. docs/design.md and docs/low_bits.md have measurements.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float16, Int, Int8, Shaped

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


def matmul(
    x: Float[Array, "R D"],
    width: int,
    tiles: Shaped[Array, "tiles groups steps 64 4"],
    *scales: Shaped[Array, "tiles scales 64"],
) -> Float[Array, "R F"]:
    """Return ``x @ weight`` in float32; without a gradient.

    Args:
        x: float32.
        width: F.
        tiles: int8, or uint8 with two numbers of 0 to 15 in a byte.
        scales: Float16 or float32, a scale of each group and column (`scale_shape`). Perhaps followed by float16
            numbers that are added to the scaled ones, or by uint8 zeros that are subtracted before.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)
    return jax.ffi.ffi_call("hydrajax_matmul_few_bits", out, vmap_method="sequential")(x, tiles, *scales)


def matmul_experts(
    x: Float[Array, "R_or_pairs D"],
    experts: Int[Array, "R k"],
    width: int,
    tiles: Shaped[Array, "E tiles groups steps 64 4"],
    *scales: Shaped[Array, "E tiles scales 64"],
) -> Float[Array, "pairs F"]:
    """Return `matmul` with the weight of its expert for each pair of a row and one of its experts.

    See `hydrajax.ops.cpu.experts.matmul_experts`.
    """
    out = jax.ShapeDtypeStruct((experts.size, width), jnp.float32)
    call = jax.ffi.ffi_call("hydrajax_matmul_few_bits_experts", out)
    return call(x, experts.astype(jnp.int32), tiles, *scales)
