"""GPU kernel: matmuls of 16-bit rows with the matrices of their experts, which are read where they lie.

XLA copies an expert's matrices before it multiplies several rows with them, three times the bytes, and its `ragged_dot`
reads those of all experts. Here a program multiplies a block of rows, all of one expert, with some of its columns. int8
weights are widened on the chip.

Written in Pallas for Triton, like `hydrajax.ops.gpu.tree_attention`. It needs compute capability 8.0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, Num

from hydrajax.models.arrays import Array
from hydrajax.ops.gpu.launch import dot, launch

NAME = "hydrajax_matmul_experts"  # in a compiled program
COLUMNS, DEPTH = 64, 64  # of a program, and of a turn of its loop
LEAST, MOST = 16, 64  # rows of a block


def fits(weight: Num[Array, "E D F"], dtype) -> bool:
    """Return whether the kernel multiplies rows of this dtype with these experts' weights."""
    _, depth, width = weight.shape
    sixteen_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return sixteen_bit and weight.dtype in (dtype, jnp.int8) and width % COLUMNS == 0 and depth % DEPTH == 0


def rows_of_block(n_pairs: int, n_experts: int) -> int:
    """Return the rows of a block, for this number of pairs of a token and an expert."""
    return LEAST if n_pairs <= n_experts * LEAST else MOST


def matmul(
    x: Float[Array, "R D"],
    rows: Int[Array, "blocks tile"],
    experts: Int[Array, " blocks"],
    weight: Num[Array, "E D F"],
    scale: Float[Array, "E F"] | None,
    dtype,
    *,
    interpret: bool = False,
) -> Float[Array, "blocks tile F"]:
    """Return the product of each row of each block with its block's expert, in this dtype, summed in float32.

    Args:
        x: Rows.
        rows: The rows of x in each block.
        experts: The expert of each block. Blocks of E are left out, and their results arbitrary.
        weight: 16-bit, or int8.
        scale: Of each column of an int8 weight.
        dtype: Of the result.
        interpret: Run without a GPU.
    """
    blocks, tile = rows.shape
    width = weight.shape[2]
    arrays = () if scale is None else (scale,)
    return launch(
        functools.partial(_share, tile=tile),
        *(x, rows, experts, weight, *arrays),
        name=NAME,
        grid=(blocks, width // COLUMNS),
        out_shape=jax.ShapeDtypeStruct((blocks, tile, width), dtype),
        warps=4,
        stages=4,
        interpret=interpret,
    )


def _share(x, rows, experts, weight, *others, tile: int):
    """Multiply one block with some columns of its expert."""
    *scale, out = others
    block, here = pl.program_id(0), pl.ds(pl.program_id(1) * COLUMNS, COLUMNS)
    expert = experts[block]

    @pl.when(expert < weight.shape[0])
    def _():
        row = rows[block, :]

        def add(turn, total):
            at = pl.ds(turn * DEPTH, DEPTH)
            return total + dot(x[row, at], weight[expert, at, here].astype(x.dtype))

        total = jax.lax.fori_loop(0, weight.shape[1] // DEPTH, add, jnp.zeros((tile, COLUMNS), jnp.float32))
        for numbers in scale:
            total *= numbers[expert, here].astype(jnp.float32)
        out[block, :, here] = total.astype(out.dtype)
