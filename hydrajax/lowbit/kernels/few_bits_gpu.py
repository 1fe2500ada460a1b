"""GPU kernel: products of a few 16-bit rows with weights of 4 bits in groups, which are widened on the chip.

XLA multiplies 8-bit weights with one scale per output as they lie in memory, but writes weights with a scale per group
out in 16 bits in every step (`hydrajax.lowbit.int4.Int4`). Here a program widens some columns
of some groups in registers. The groups of a narrow weight are split among programs, whose sums are added after them.

Written in Pallas for Triton, like `hydrajax.ops.gpu.tree_attention`. It needs compute capability 8.0.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Float16, UInt8

from hydrajax.models.arrays import Array
from hydrajax.ops.gpu.launch import dot, launch

NAME = "hydrajax_matmul_int4"  # in a compiled program
HALF = 16  # inputs of a group whose numbers lie in the low bits of a byte
LEAST = 16  # rows of a tensor core's product
TILE, MOST_ROWS = 64, 128  # rows of a program, and of a product; more are bound by operations
COLUMNS = 64  # the width is a multiple of them
PROGRAMS = 128  # wanted: the multiprocessors of a large GPU


class Tiles(NamedTuple):
    """How a product is divided.

    Attributes:
        splits: Programs that share the groups, at most. Their sums are written in float32 and read again.
        columns: Of a program.
        groups: Of a turn of its loop.
        warps, stages: Of a program, and of its pipeline.
    """

    splits: int
    columns: int = COLUMNS
    groups: int = 8
    warps: int = 4
    stages: int = 3


TILES = {LEAST: Tiles(splits=8), TILE: Tiles(splits=2)}  # by rows of a program


def fits(rows: int, groups: int, width: int, dtype) -> bool:
    """Return whether the kernel multiplies this many rows with a weight of this many groups and columns."""
    sixteen_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return sixteen_bit and 0 < rows <= MOST_ROWS and width % COLUMNS == 0 and groups > 0


def matmul(
    x: Float[Array, "R D"],
    values: UInt8[Array, "groups 16 F"],
    scale: Float16[Array, "groups F"],
    offset: Float16[Array, "groups F"],
    dtype=jnp.float32,
    *,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """Return ``x @ weight`` in this dtype, summed in float32. The widened weight is rounded to x's dtype."""
    (rows, _), (groups, _, width) = x.shape, values.shape
    tile = LEAST if rows <= LEAST else min(TILE, pl.next_power_of_2(rows))
    tiles = TILES[LEAST if tile == LEAST else TILE]
    columns = tiles.columns if width % tiles.columns == 0 else COLUMNS
    turn = next(size for size in (tiles.groups, 8, 4, 2, 1) if groups % size == 0)
    splits = min(tiles.splits, pl.next_power_of_2(max(1, PROGRAMS * columns // width)), groups // turn)
    out = launch(
        functools.partial(_share, tile=tile, columns=columns, turn=turn, splits=splits),
        *(x.reshape(rows, groups, 2, HALF), values, scale, offset),
        name=NAME,
        grid=(pl.cdiv(rows, tile), width // columns, splits),
        out_shape=jax.ShapeDtypeStruct((splits, rows, width), dtype if splits == 1 else jnp.float32),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
    )
    return out[0] if splits == 1 else jnp.sum(out, axis=0).astype(dtype)


def _share(x, values, scale, offset, out, *, tile: int, columns: int, turn: int, splits: int):
    """Multiply one tile of rows with some columns of one share of the groups."""
    split = pl.program_id(2)
    row = jnp.minimum(pl.program_id(0) * tile + jnp.arange(tile), x.shape[0] - 1)
    here = pl.ds(pl.program_id(1) * columns, columns)
    turns = values.shape[0] // turn
    per_split = pl.cdiv(turns, splits)
    begin = split * per_split
    dtype, depth = x.dtype, turn * HALF

    def per_input(numbers):
        spread = jnp.broadcast_to(numbers.astype(jnp.float32)[:, None], (turn, HALF, columns))
        return spread.reshape(depth, columns)

    def add(number, total):
        at = pl.ds(number * turn, turn)
        pairs = values[at, :, here].reshape(depth, columns).astype(jnp.int32)
        step, least = per_input(scale[at, here]), per_input(offset[at, here])
        for half, numbers in enumerate((pairs & 15, pairs >> 4)):
            weight = (numbers.astype(jnp.float32) * step + least).astype(dtype)
            total += dot(x[row, at, half, :].reshape(tile, depth), weight)
        return total

    total = jnp.zeros((tile, columns), jnp.float32)
    total = jax.lax.fori_loop(begin, jnp.minimum(begin + per_split, turns), add, total)
    out[split, row, here] = total.astype(out.dtype)
