"""The KV cache: one array per layer, ``[B, n_kv_heads, slots, head_dim]``, with a length per sequence.

Layers are a tuple and not a stacked axis: indexing a stacked cache inside the decode loop makes XLA copy it
(docs/design.md 7). Slots at or beyond a sequence's length hold garbage, which is masked on read and overwritten later.
A cache needs room for the longest text and one more tree, because `dynamic_update_slice` moves a write that does not
fit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Num

from hydrajax import ops
from hydrajax.models.arrays import Array
from hydrajax.models.attention import Filled, KVSegment
from hydrajax.models.kv_vectors import KeyValue, empty
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.recurrent_cache import PathNodes, RecurrentCache
from hydrajax.ops.sharded import DATA, MODEL, shard

# What each layer keeps of the tokens fed now: keys and values, or what its state takes in; None for a layer that
# attends to another's.
Block = tuple[KeyValue | RecurrentCache | PathNodes | None, ...]
States = tuple[RecurrentCache, ...]  # of the recurrent layers, in order; none without such layers


class KVCache(NamedTuple):
    """A KV cache: ``layers[l]`` holds keys and values of layer l, its state, or None if it attends to another layer's;
    ``lengths`` int32 ``[B]`` the filled slots.
    """

    layers: tuple[KeyValue | RecurrentCache | None, ...]
    lengths: Int[Array, " B"]

    def segments(self, layer: int, first_seen: Int[Array, "B T"] | None = None) -> tuple[KVSegment, ...]:
        """Return the filled slots of this layer of attention as a segment.

        Args:
            first_seen: The first slot that each query attends to under a sliding window; None for all.
        """
        return (KVSegment.of(self.layers[layer], Filled(self.lengths, first_seen)),)


class PendingKVCache(NamedTuple):
    """A KV cache with M more tokens that were run but not committed, such as those of a tree that is being drafted.

    A forward pass takes it in place of a cache.

    Attributes:
        sees: bool ``[B, T, M]`` which of them each of the T tokens fed now attends to.
        positions: int32 ``[B, M]`` their positions, for sliding windows.
    """

    cache: KVCache
    block: Block
    sees: Bool[Array, "B T M"]
    positions: Int[Array, "B M"]

    def segments(self, layer: int, first_seen: Int[Array, "B T"] | None = None) -> tuple[KVSegment, ...]:
        """Return the segments of this layer; see `KVCache.segments`."""
        sees = self.sees
        if first_seen is not None:
            sees = sees & (self.positions[:, None, :] >= first_seen[:, :, None])
        return (KVSegment.of(self.block[layer], sees[:, None, None]), *self.cache.segments(layer, first_seen))


def init_cache(config: LlamaConfig, batch: int, slots: int, dtype, kv_cache: str | None = None) -> KVCache:
    """Return an empty cache of at least ``slots`` slots, zeroed because 0 * NaN would poison masked attention.

    On a mesh its sequences and key-value heads are sharded, as in attention. ``kv_cache`` names a type of
    fewer bits (`hydrajax.models.kv_vectors.KV_CACHES`).
    """

    def of_layer(layer: LlamaConfig) -> KeyValue | RecurrentCache | None:
        if layer.recurrent is not None:
            return RecurrentCache.empty(layer.recurrent, batch, dtype)
        if layer.shared_kv:
            return None
        shape = (batch, layer.n_kv_heads, ops.here().padded_slots(slots), layer.head_dim)
        kept = (empty(shape, dtype, kv_cache) for _ in range(1 if layer.latent else 2))
        return tuple(jax.tree.map(lambda x: shard(x, DATA, MODEL), x) for x in kept)

    layers = tuple(of_layer(config.of_layer(i)) for i in range(config.n_layers))
    return KVCache(layers, jnp.zeros(batch, jnp.int32))


def after_reads(lengths: Int[Array, " B"], witness: Array) -> Int[Array, " B"]:
    """Return ``lengths`` unchanged, but as a value that depends on ``witness`` ``[B]``.

    A cache that one program reads and writes must be written last. XLA does not infer this: if it may write first, it
    copies the whole cache so that later reads find the old values, and `optimization_barrier` is gone by the time it
    decides (jax 0.10 on CPU). The position of the write therefore depends on a value computed from the last read.
    Lengths are never negative, so the maximum with -1 or -2 is the length itself, which XLA cannot know.
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
    """Append ``counts[b]`` tokens of ``block`` to each sequence; garbage is written beyond them.

    Args:
        index: ``[B, R]`` which tokens of the block, in order; None for the first ones.
        after: ``[B]``, any value computed from this program's last read of the cache (`after_reads`); None only if the
            program does not read it.
    """
    starts = cache.lengths if after is None else after_reads(cache.lengths, after)
    layers: list[Any] = list(cache.layers)
    alike: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, RecurrentCache):
            layers[i] = layer.after(block[i], counts, index)
        elif layer is not None:
            alike.setdefault(tuple(x.shape for x in jax.tree.leaves(layer)), []).append(i)
    for places in alike.values():  # a kernel writes arrays of one shape
        slots, treedef = jax.tree.flatten([layers[i] for i in places])
        parts = jax.tree.leaves([block[i] for i in places])
        written = jax.tree.unflatten(treedef, ops.append_rows(slots, parts, index, starts))
        for i, layer in zip(places, written, strict=True):
            layers[i] = layer
    return KVCache(tuple(layers), cache.lengths + counts)


def cut_caches(state: Any, lengths: Int[Array, " B"]) -> Any:
    """Cut every cache in a pytree to the first ``lengths[b]`` tokens."""
    return jax.tree.map(
        lambda part: part._replace(lengths=jnp.minimum(part.lengths, lengths)) if isinstance(part, KVCache) else part,
        state,
        is_leaf=lambda part: isinstance(part, KVCache),
    )


def states_of(cache: KVCache) -> States:
    """Return the states of the recurrent layers, which no length can cut."""
    return tuple(layer for layer in cache.layers if isinstance(layer, RecurrentCache))


def with_states(cache: KVCache, states: States) -> KVCache:
    """Return the cache with these states of its recurrent layers."""
    left = iter(states)
    layers = (next(left) if isinstance(layer, RecurrentCache) else layer for layer in cache.layers)
    return cache._replace(layers=tuple(layers))


def write_tokens(
    rows: Num[Array, "B S *k"], tokens: Num[Array, "B T *k"], starts: Int[Array, " B"]
) -> Num[Array, "B S *k"]:
    """Overwrite ``rows`` from position ``starts[b]`` on with ``tokens``, or with values for each token."""
    rest = (0,) * (rows.ndim - 2)
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, *rest)))(rows, tokens, starts)
