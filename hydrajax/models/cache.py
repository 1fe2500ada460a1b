"""The key-value cache: one array per layer, ``[B, n_kv_heads, slots, head_dim]``, with its own length in every row.

Layers are a tuple and not a stacked axis: indexing a stacked cache inside the decode loop makes XLA copy it
(docs/design.md 7). Slots at or beyond a row's length hold garbage, which is masked on read and overwritten later. So a
cache needs room for the longest text and one tree more: `dynamic_update_slice` moves a write that does not fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Num

from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.attention import Filled, KeyValue, KVSegment
from hydrajax.models.llama_config import LlamaConfig

Block = tuple[KeyValue, ...]  # keys and values of the tokens fed now, layer by layer


class KVCache(NamedTuple):
    """``layers[l]`` holds keys and values of layer l; ``lengths`` int32 ``[B]`` counts the filled slots of a row."""

    layers: Block
    lengths: Int[Array, " B"]

    def parts(self, layer: int, first_seen: Int[Array, "B T"] | None = None) -> tuple[KVSegment, ...]:
        """What queries may attend to in this layer: the filled slots of each row.

        first_seen: the first slot that each query still sees, where a sliding window ends; None for all of them.
        """
        return (KVSegment(*self.layers[layer], Filled(self.lengths, first_seen)),)


class PendingKVCache(NamedTuple):
    """A cache, and M tokens beyond it that were run but not committed, such as those of a tree that is being drafted.

    It stands in a forward pass for the cache. block: their keys and values. sees: bool ``[B, T, M]`` which of them each
    of the T tokens fed now sees. positions: int32 ``[B, M]`` where they stand in the text, for sliding windows.
    """

    cache: KVCache
    block: Block
    sees: Bool[Array, "B T M"]
    positions: Int[Array, "B M"]

    def parts(self, layer: int, first_seen: Int[Array, "B T"] | None = None) -> tuple[KVSegment, ...]:
        """What queries may attend to in this layer; see `KVCache.parts`."""
        sees = self.sees
        if first_seen is not None:
            sees = sees & (self.positions[:, None, :] >= first_seen[:, :, None])
        return (KVSegment(*self.block[layer], sees[:, None, None]), *self.cache.parts(layer, first_seen))


def init_cache(config: LlamaConfig, batch: int, slots: int, dtype) -> KVCache:
    """An empty cache of at least so many slots. Zeros, not `jnp.empty`: 0 * NaN would poison masked attention."""
    shape = (batch, config.n_kv_heads, backend.whole_slots(slots), config.head_dim)
    layers = tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers))
    return KVCache(layers, jnp.zeros(batch, jnp.int32))


def after_reads(lengths: Int[Array, " B"], witness: Array) -> Int[Array, " B"]:
    """``lengths``, unchanged, but not known before ``witness`` ``[B]`` is.

    A cache that is read and then written in one program must be written last. XLA does not see that by itself: where it
    may do the write first, it copies the whole cache so that the reads still find the old values, and
    `optimization_barrier` is gone by the time it decides (jax 0.10 on CPU). So the place of the write is made to depend
    on something that was computed from the last read. Lengths are never negative, and the maximum with -1 or -2 is the
    length itself, which XLA cannot know.
    """
    return jnp.maximum(lengths, -1 - (witness > 0))


def append(
    cache: KVCache,
    block: Block,
    counts: Int[Array, " B"],
    *,
    index: Int[Array, "B R"] | None = None,
    after: Array | None = None,
) -> KVCache:
    """Add ``counts[b]`` tokens of ``block`` to row b; garbage is written beyond them, as far as the block goes.

    index: ``[B, R]`` which tokens of the block, in this order; None for the first ones. after: ``[B]``, anything
    computed from this program's last read of the cache (`after_reads`); None only for a cache that the program does not
    read.
    """
    starts = cache.lengths if after is None else after_reads(cache.lengths, after)
    slots, treedef = jax.tree.flatten(cache.layers)
    written = backend.append_rows(slots, jax.tree.leaves(block), index, starts)
    return KVCache(jax.tree.unflatten(treedef, written), cache.lengths + counts)


def cut_caches(state: Any, lengths: Int[Array, " B"]) -> Any:
    """Any pytree, with every cache in it cut to the first ``lengths[b]`` tokens of row b, where it holds more."""
    return jax.tree.map(
        lambda part: part._replace(lengths=jnp.minimum(part.lengths, lengths)) if isinstance(part, KVCache) else part,
        state,
        is_leaf=lambda part: isinstance(part, KVCache),
    )


def write_tokens(
    rows: Num[Array, "B S *k"], tokens: Num[Array, "B T *k"], starts: Int[Array, " B"]
) -> Num[Array, "B S *k"]:
    """``rows`` with ``tokens``, or numbers for each, written over them from place ``starts[b]`` of each row on."""
    rest = (0,) * (rows.ndim - 2)
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, *rest)))(rows, tokens, starts)
