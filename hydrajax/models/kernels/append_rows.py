"""GPU kernel: the accepted tokens' keys and values of all layers, written into their caches at once.

XLA writes each of a 7B's 64 caches by a kernel of its own, and in a tree step each of these computes the accepted rows
anew from the projection's partial sums (0.4 GB a step). Here one kernel picks the accepted rows out of the block and
writes them, in place. In Pallas for Triton, so that it runs on a CPU in interpret mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array

NAME = "hydrajax_append_rows"


def append_rows(
    caches: Sequence[Float[Array, "B kv S H"]],
    blocks: Sequence[Float[Array, "B kv T H"]],
    index: Int[Array, "B R"],
    starts: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> Sequence[Float[Array, "B kv S H"]]:
    """``caches`` with token ``index[b, r]`` of each block in slot ``starts[b] + r``; there must be R slots from there.

    The caches are written in place where XLA can give them away. H must be a power of two.
    """
    (batch, n_kv, *_), count = caches[0].shape, len(caches)

    def kernel(index, starts, *refs):
        old, blocks, caches = refs[:count], refs[count : 2 * count], refs[2 * count :]
        del old  # the same memory as the outputs
        row, head, place = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        token, slot = index[row, place], starts[row] + place
        for block, cache in zip(blocks, caches, strict=True):
            cache[row, head, slot, :] = block[row, head, token, :]

    kernel.__name__ = NAME  # as jax 0.11 calls it; jax 0.10 by the name below
    return pl.pallas_call(
        kernel,
        grid=(batch, n_kv, index.shape[1]),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={2 + i: i for i in range(count)},
        compiler_params=triton.CompilerParams(num_warps=1),
        interpret=interpret,
        name=NAME,
    )(index, starts, *caches, *blocks)


def fits(head_dim: int) -> bool:
    return head_dim.bit_count() == 1
