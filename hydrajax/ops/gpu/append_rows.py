"""GPU kernel: write the accepted tokens' keys and values of all layers into their caches at once.

XLA writes each of a 7B model's 64 caches by its own kernel, and in a tree step each of these recomputes the accepted
rows from the projection's partial sums (0.4 GB per step). Here one kernel selects the accepted rows of the block and
writes them in place. Written in Pallas for Triton, so that it runs on a CPU in interpret mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jaxtyping import Int, Num

from hydrajax.models.arrays import Array
from hydrajax.ops.gpu.launch import launch

NAME = "hydrajax_append_rows"


def append_rows(
    caches: Sequence[Num[Array, "B kv S _"]],
    blocks: Sequence[Num[Array, "B kv T _"]],
    index: Int[Array, "B R"],
    starts: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> Sequence[Num[Array, "B kv S _"]]:
    """Write token ``index[b, r]`` of each block into slot ``starts[b] + r`` of ``caches``; R slots must be free there.

    The caches are updated in place if XLA can donate them. H must be a power of two.
    """
    (batch, n_kv, *_), count = caches[0].shape, len(caches)

    def kernel(index, starts, *refs):
        old, blocks, caches = refs[:count], refs[count : 2 * count], refs[2 * count :]
        del old  # aliases the outputs
        row, head, place = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        token, slot = index[row, place], starts[row] + place
        for block, cache in zip(blocks, caches, strict=True):
            cache[row, head, slot, :] = block[row, head, token, :]

    return launch(
        kernel,
        *(index, starts, *caches, *blocks),
        name=NAME,
        grid=(batch, n_kv, index.shape[1]),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        aliases={2 + i: i for i in range(count)},
        warps=1,
        interpret=interpret,
    )


def fits(head_dim: int) -> bool:
    return head_dim.bit_count() == 1
