"""The key-value cache: one array per layer, ``[B, n_kv_heads, slots, head_dim]``, ragged lengths per row.

Layers are a tuple and not a stacked axis: indexing a stacked cache inside the decode loop makes XLA copy it
(DESIGN section 7). Slots at or beyond a row's length hold garbage that is masked on read and overwritten later, so
allocate `max_len + tree nodes` slots: `dynamic_update_slice` clamps silently at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from hydrajax.models.config import LlamaConfig
from hydrajax.models.layers import KeyValue

Block = tuple[KeyValue, ...]  # keys and values of the tokens fed now, layer by layer


class KVCache(NamedTuple):
    """``layers[l]`` holds keys and values of layer l; ``lengths`` int32 ``[B]`` counts the filled slots of a row."""

    layers: Block
    lengths: Int[Array, " B"]


def init_cache(config: LlamaConfig, batch: int, slots: int, dtype) -> KVCache:
    """An empty cache. Zeros, not `jnp.empty`: 0 * NaN would poison masked attention."""
    shape = (batch, config.n_kv_heads, slots, config.head_dim)
    layers = tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers))
    return KVCache(layers, jnp.zeros(batch, jnp.int32))


def _write(slots: Array, rows: Array, starts: Int[Array, " B"]) -> Array:
    """Write ``rows [B, kv, R, H]`` into ``slots [B, kv, S, H]`` at slot ``starts[b]`` of each batch row, in place."""
    if slots.shape[0] == 1:  # one slice update; the batched form is a scatter
        return jax.lax.dynamic_update_slice(slots, rows, (0, 0, starts[0], 0))
    update = jax.vmap(lambda s, r, at: jax.lax.dynamic_update_slice(s, r, (0, at, 0)))
    return update(slots, rows, starts)


def append(cache: KVCache, block: Block, counts: Int[Array, " B"], after: Array | None = None) -> KVCache:
    """Add the first ``counts[b]`` tokens of ``block`` to row b; the rest is written beyond the length, as garbage.

    ``after`` ``[B]`` is anything computed from this step's last read of the cache. It makes the write wait for the
    reads through a data dependency: where XLA may do the write first, it copies the whole cache to keep the reads
    right (`optimization_barrier` is gone by the time it decides, jax 0.10 on CPU).
    """
    starts = cache.lengths
    if after is not None:
        starts = jnp.maximum(starts, -1 - (after > 0))  # always `starts`, which are never negative
    layers = tuple(
        (_write(keys, new_keys, starts), _write(values, new_values, starts))
        for (keys, values), (new_keys, new_values) in zip(cache.layers, block, strict=True)
    )
    return KVCache(layers, cache.lengths + counts)


def take_tokens(block: Block, index: Int[Array, "B R"]) -> Block:
    """The keys and values of block tokens ``index[b]`` in that order (a gather: see openxla/xla#49176)."""
    at = index[:, None, :, None]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=2), block)
