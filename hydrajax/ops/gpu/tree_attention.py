"""GPU kernel: attention of a tree's nodes, or of one token, to a cache and to the tree itself.

XLA's own program computes the scores of every slot of the cache, writes them in float32 and reads them twice. Here the
filled slots are read once, and no score leaves the chip. All nodes of a tree attend to the whole text before it, so
for the cache they are additional rows of one matmul (flash decoding: slots are split among programs, whose
results a second small kernel combines under a common maximum). The tree's own keys are processed before the first
share of the cache, under the tree mask.

Alternatives: `jax.experimental.pallas.ops.gpu.decode_attention` has no mask or window that differs between rows,
splits all slots instead of the filled ones, and accumulates partial results in bfloat16. `jax.nn`'s cuDNN attention
has neither a tree mask without an array of all scores, nor splits.

Written in Pallas for Triton, so that it runs on a CPU in interpret mode, where the tests compare it with NumPy.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Bool, Float, Int

from hydrajax.models.arrays import Array
from hydrajax.ops.gpu.launch import dot, launch

NAME, SUM_NAME = "hydrajax_tree_attention", "hydrajax_tree_attention_sum"  # names in a compiled program
MASKED, TINY = -1e30, 1e-30
LEAST = 16  # rows and columns of a tensor core's matmul
MOST_TOKENS = 128  # of a tree: its keys and scores stay on the chip
MOST_LINES = 128  # queries of a program, over all heads that share a key-value head
SLOTS, STAGES = 64, 3  # of the cache, per iteration of the kernel's loop, and iterations that are loaded ahead
WIDE = 256  # numbers of a head for which half of the queries and one iteration less fit into shared memory
# Programs per layer: the multiprocessors of a large GPU. Not more, because partial sums are written in float32 and read
# again.
PROGRAMS, MOST_SPLITS = 128, 8


class Shares(NamedTuple):
    """Partial sums of a split: values weighted by exp(score - peak), these weights, the peak."""

    weighted: Float[Array, "splits B_kv rows H"]
    total: Float[Array, "splits B_kv rows"]
    peak: Float[Array, "splits B_kv rows"]


def fits(n_tokens: int, head_dim: int, dtype) -> bool:
    """Return whether the kernel applies: 16-bit numbers, a head of 16, 32, 64 ... numbers, a tree that is not too
    large.
    """
    sixteen_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return sixteen_bit and n_tokens <= MOST_TOKENS and LEAST <= head_dim <= WIDE and head_dim.bit_count() == 1


def attend(
    queries: Float[Array, "B n_heads T H"],
    block: tuple[Float[Array, "B kv T H"], Float[Array, "B kv T H"]],
    block_mask: Bool[Array, "..."],
    cache: tuple[Float[Array, "B kv S H"], Float[Array, "B kv S H"]],
    lengths: Int[Array, " B"],
    first_seen: Int[Array, "B T"] | None = None,
    *,
    sinks: Float[Array, " n_heads"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T width"]:
    """Attend to a block of T tokens and to the first ``lengths[b]`` slots of a cache.

    Softmax and sums are float32, matmuls 16-bit. The split of the sums depends neither on T nor on the number of
    slots, so a tree and a single token are rounded alike.

    Args:
        block_mask: bool ``[T, T]`` or ``[B, 1, 1, T, T]``.
        first_seen: The first visible slot of each query; None for all.
        sinks: A further logit of each head's softmax, float32; None for none.
    """
    batch, n_heads, n_tokens, head_dim = queries.shape
    n_kv, n_slots = cache[0].shape[1:3]
    assert n_slots % SLOTS == 0, n_slots
    groups = n_heads // n_kv
    rows = groups * n_tokens
    most, stages = (MOST_LINES // 2, STAGES - 1) if head_dim == WIDE else (MOST_LINES, STAGES)
    tile = min(max(LEAST, pl.next_power_of_2(rows)), most)
    tiles, padded = pl.cdiv(rows, tile), max(LEAST, pl.next_power_of_2(n_tokens))
    splits = splits_of(batch * n_kv)

    # One line of the mask per row of a tile, so that the kernel loads it directly.
    mask = jnp.asarray(block_mask).reshape(-1, n_tokens, n_tokens)
    mask = jnp.tile(mask, (1, groups, 1)).astype(jnp.int8)
    mask = jnp.pad(mask, ((0, 0), (0, tiles * tile - rows), (0, 0)), mode="edge")
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, padded - n_tokens)))
    inputs = [x.reshape(batch * n_kv, -1, head_dim) for x in (queries, *block, *cache)]
    inputs += [mask, lengths, *(() if sinks is None else (sinks,))]
    if first_seen is not None:
        seen = jnp.tile(jnp.maximum(first_seen, 0), (1, groups))
        inputs += [jnp.pad(seen, ((0, 0), (0, tiles * tile - rows)), mode="edge"), jnp.min(seen, axis=1)]

    out = jax.ShapeDtypeStruct((batch, n_tokens, n_heads, head_dim), queries.dtype)
    sums = jax.ShapeDtypeStruct((splits, batch * n_kv, rows), jnp.float32)
    shares = Shares(jax.ShapeDtypeStruct((*sums.shape, head_dim), jnp.float32), sums, sums)
    lines = Lines(n_kv, rows, n_tokens, tile)
    kernel = functools.partial(
        _share, lines=lines, padded=padded, splits=splits, per_row_mask=len(mask) > 1,
        with_sinks=sinks is not None, windowed=first_seen is not None,
    )  # fmt: skip
    found = launch(
        kernel,
        *inputs,
        name=NAME,
        grid=(tiles, batch * n_kv, splits),
        out_shape=shares if splits > 1 else out,
        warps=8 if tile > 64 else 4,
        stages=stages,
        interpret=interpret,
    )
    if splits > 1:
        # Small tiles, for one program per multiprocessor.
        found = launch(
            functools.partial(_put_together, lines=lines._replace(tile=LEAST), splits=splits),
            *found,
            name=SUM_NAME,
            grid=(pl.cdiv(rows, LEAST), batch * n_kv),
            out_shape=out,
            warps=4,
            interpret=interpret,
        )
    return found.reshape(batch, n_tokens, -1)


def splits_of(pairs: int) -> int:
    """Return the number of programs per pair of a sequence and a key-value head."""
    return min(max(1, pl.next_power_of_2(max(PROGRAMS // pairs, 1))), MOST_SPLITS)


class Lines(NamedTuple):
    """The assignment of queries to lines: a line is a head of the group that shares a key-value head, and a token."""

    n_kv: int
    rows: int
    n_tokens: int
    tile: int

    def of(self, tile: Array) -> Int[Array, " tile"]:
        """Return the lines of a tile. A partial tile repeats its last line, which is computed and written
        repeatedly.
        """
        return jnp.minimum(tile * self.tile + jnp.arange(self.tile), self.rows - 1)

    def head(self, pair: Array, line: Int[Array, " tile"]) -> Int[Array, " tile"]:
        return (pair % self.n_kv) * (self.rows // self.n_tokens) + line // self.n_tokens

    def write(self, out, pair: Array, line: Int[Array, " tile"], attended: Float[Array, "tile H"]) -> None:
        """Write into ``out``, ``[B, T, n_heads, H]``."""
        out[pair // self.n_kv, line % self.n_tokens, self.head(pair, line), :] = attended.astype(out.dtype)


def _share(
    queries, block_keys, block_values, keys, values, mask, lengths, *rest,
    lines: Lines, padded: int, splits: int, per_row_mask: bool, with_sinks: bool, windowed: bool,
):  # fmt: skip
    """Process one tile of lines of one sequence and key-value head over one share of its filled slots."""
    sinks, rest = (rest[0], rest[1:]) if with_sinks else (None, rest)
    first_seen, oldest = rest[:2] if windowed else (None, None)
    outputs = rest[2:] if windowed else rest
    tile, pair, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, line = pair // lines.n_kv, lines.of(tile)
    here = pl.ds(tile * lines.tile, lines.tile)
    q = queries[pair, line, :]
    scale = q.shape[-1] ** -0.5

    def add(sums, k, v, visible):
        """Return the sums with these keys and values added, as far as they are visible."""
        weighted, total, peak = sums
        scores = jnp.where(visible, dot(q, k.T) * scale, MASKED)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp(scores - higher[:, None]), 0.0)
        shrink = jnp.exp(peak - higher)
        weighted = weighted * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return weighted, total * shrink + jnp.sum(weights, axis=1), higher

    total, peak = jnp.zeros(lines.tile, jnp.float32), jnp.full(lines.tile, MASKED, jnp.float32)
    if with_sinks:  # the weight of the sink, once, not per share
        total, peak = jnp.where(split == 0, jnp.ones_like(total), total), sinks[lines.head(pair, line)]
    sums = jnp.zeros(q.shape, jnp.float32), total, peak
    node = jnp.minimum(jnp.arange(padded), lines.n_tokens - 1)  # padding that is never visible
    visible = mask[row if per_row_mask else 0, here, :] != 0
    # Once, not per share.
    sums = add(sums, block_keys[pair, node, :], block_values[pair, node, :], visible & (split == 0))

    filled = lengths[row]
    first, last = oldest[row] // SLOTS if windowed else 0, pl.cdiv(filled, SLOTS)
    per_split = pl.cdiv(last - first, splits)
    begin = first + split * per_split
    seen = first_seen[row, here] if windowed else None

    def turn(number, sums):
        slots = number * SLOTS + jnp.arange(SLOTS)
        k, v = (x[pair, pl.ds(number * SLOTS, SLOTS), :] for x in (keys, values))
        v = jnp.where((slots < filled)[:, None], v, jnp.zeros_like(v))  # garbage may be NaN, and so 0 times it
        visible = jnp.broadcast_to((slots < filled)[None, :], (lines.tile, SLOTS))
        if windowed:
            visible = visible & (slots[None, :] >= seen[:, None])
        return add(sums, k, v, visible)

    weighted, total, peak = jax.lax.fori_loop(begin, jnp.minimum(begin + per_split, last), turn, sums)
    if splits == 1:  # nothing to combine
        lines.write(outputs[0], pair, line, weighted / jnp.maximum(total, TINY)[:, None])
        return
    outputs[0][split, pair, line, :] = weighted
    outputs[1][split, pair, line] = total
    outputs[2][split, pair, line] = peak


def _put_together(weighted, total, peak, out, *, lines: Lines, splits: int):
    """Combine all shares of one tile of lines of one sequence and key-value head."""
    tile, pair = pl.program_id(0), pl.program_id(1)
    line = lines.of(tile)
    peaks = [peak[split, pair, line] for split in range(splits)]
    highest = functools.reduce(jnp.maximum, peaks)
    scales = [jnp.exp(one - highest) for one in peaks]
    whole = sum(total[split, pair, line] * scale for split, scale in enumerate(scales))
    sums = sum(weighted[split, pair, line, :] * scale[:, None] for split, scale in enumerate(scales))
    lines.write(out, pair, line, sums / jnp.maximum(whole, TINY)[:, None])


# jax 0.10 names a kernel by its argument, jax 0.11 by its function.
_share.__name__, _put_together.__name__ = NAME, SUM_NAME
