"""Attention: rotary embeddings, and one softmax over several segments of keys and values.

The base, the prefix layer and every drafter with attention call the same `attend`. It attends to a sequence of
segments: the keys and values of the tokens fed now, and those in caches (`hydrajax.models.cache`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from hydrajax import ops
from hydrajax.models.arrays import Array
from hydrajax.models.kv_vectors import KeyValue, Vectors, in_parts, widened
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops.sharded import DATA, MODEL, axis_over, on_each_device

# Large enough that exp() underflows to zero after subtracting the row maximum, finite so that a fully masked row (a
# padding token) gives a harmless average and not NaN.
MASKED = -1e30

# Queries of a text per chunk. Only one chunk's scores exist at once, so a long prompt does not need the square of its
# length.
QUERY_CHUNK = 128
# Sections of a text, unrolled in the program so that each reads only the keys that it attends to. Within a section the
# chunks are a loop, because XLA would compile every unrolled chunk.
UNROLLED_SECTIONS = 16


@functools.partial(jax.tree_util.register_dataclass, data_fields=["lengths"], meta_fields=["n_tokens", "window"])
@dataclass(frozen=True)
class Causal:
    """A causal mask: token i of a block of ``n_tokens`` attends to tokens 0..i, or the last ``window`` of these.

    Two numbers replace a mask, which for a prompt of 32,768 tokens would take a gigabyte. NumPy converts it to one.

    Attributes:
        lengths: int32 ``[B]`` tokens of each right-padded text, which only layers that keep a state read: in attention
            no token sees a later one. None for whole rows.
    """

    n_tokens: int
    window: int | None = None
    lengths: Int[Array, " B"] | None = None

    def rows(self, positions: Int[Array, " R"] | Int[np.ndarray, " R"]) -> Bool[Array, "R T"]:
        """Return the mask rows of the tokens at these positions."""
        xp = np if isinstance(positions, np.ndarray) else jnp  # a constant, or one line of the program
        distance = positions[:, None] - xp.arange(self.n_tokens)
        return (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)

    def __array__(self, dtype=None, copy=None) -> Bool[np.ndarray, "T T"]:
        return self.rows(np.arange(self.n_tokens))


class Documents(NamedTuple):
    """The mask of documents packed into rows; unlike a tree's, of tokens in the order of their positions.

    Attributes:
        mask: bool ``[B, 1, 1, T, T]``.
    """

    mask: Bool[Array, "B 1 1 T T"]


@jax.tree_util.register_static
@dataclass(frozen=True)
class SamePosition:
    """A mask by which query t attends to slot t alone: guesses about a text, one per position (EAGLE's training)."""


Mask = Bool[Array, "..."] | Causal | Documents


def windowed(
    block_mask: Mask, positions: Int[Array, "B T"], window: int | None
) -> tuple[Mask, Int[Array, "B T"] | None]:
    """Return a mask limited to the last ``window`` tokens, and the first position that each token attends to.

    Without a window, return the mask and None.
    """
    if isinstance(block_mask, Documents):
        block_mask = block_mask.mask
    if isinstance(block_mask, Causal):
        block_mask = replace(block_mask, lengths=None)  # no layer of attention reads them
    if window is None:
        return block_mask, None
    first_seen = positions - window + 1
    if isinstance(block_mask, Causal):  # of a text, whose positions are consecutive
        return replace(block_mask, window=window), first_seen
    return block_mask & (positions[:, None, :] >= first_seen[:, :, None])[:, None, None], first_seen


class Filled(NamedTuple):
    """A mask of the filled slots of a cache, in a few numbers so that kernels can skip the others.

    Attributes:
        lengths: int32 ``[B]`` filled slots.
        first_seen: The first slot that query t attends to under a sliding window; None for all.
    """

    lengths: Int[Array, " B"]
    first_seen: Int[Array, "B T"] | None = None

    def seen_by(self, queries: Int[Array, " R"] | Int[np.ndarray, " R"]) -> Filled:
        """Return the mask for some of the queries."""
        return self if self.first_seen is None else self._replace(first_seen=self.first_seen[:, queries])

    def mask(self, n_slots: int) -> Bool[Array, "B 1 1 T_or_1 S"]:
        """Return whether query t of sequence b attends to slot s."""
        slots = jnp.arange(n_slots)
        filled = (slots < self.lengths[:, None])[:, None, None, None, :]
        return filled if self.first_seen is None else filled & (slots >= self.first_seen[:, None, None, :, None])


class KVSegment(NamedTuple):
    """Keys and values, and which of them each query attends to.

    Attributes:
        keys, values: ``[B, n_kv_heads, S, head_dim]``, as the cache stores them (`hydrajax.models.kv_vectors`).
        visible: bool, broadcastable to ``[B, 1, 1, T, S]``: whether query t of sequence b attends to slot s. A static
            ``[T, S]`` mask is a NumPy constant, folded into the program. `Causal` for a text, `Filled` for a cache,
            `SamePosition` for guesses about a text.
    """

    keys: Vectors
    values: Vectors
    visible: Mask | Filled | SamePosition

    @classmethod
    def of(cls, layer: KeyValue, visible: Mask | Filled | SamePosition) -> KVSegment:
        """Return the segment of what a layer keeps."""
        return cls(layer[0], layer[-1], visible)

    def with_mask(self) -> KVSegment:
        """Return the segment with ``visible`` as an array."""
        if isinstance(self.visible, Filled):
            return self._replace(visible=self.visible.mask(self.keys.shape[2]))
        if isinstance(self.visible, Causal):
            return self._replace(visible=np.asarray(self.visible))
        if isinstance(self.visible, SamePosition):
            return self._replace(visible=np.eye(self.keys.shape[2], dtype=bool))
        return self

    def seen_by(self, queries: Int[Array, " R"] | Int[np.ndarray, " R"]) -> KVSegment:
        """Return the segment for some of the queries."""
        if isinstance(self.visible, SamePosition):
            return self._replace(keys=self.keys[:, :, queries], values=self.values[:, :, queries])
        if isinstance(self.visible, Filled):
            return self._replace(visible=self.visible.seen_by(queries))
        return self._replace(visible=self.with_mask().visible[..., queries, :])


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return rotary angular frequencies, float32 ``[rotated features / 2]`` (radians per position), after any
    scaling.
    """
    n_features = config.rotary_dim or config.head_dim
    exponents = np.arange(0, n_features, 2, dtype=np.float32) / n_features
    freqs = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    return freqs if config.rope_scaling is None else config.rope_scaling.scaled(freqs, config.rope_theta)


def rope_table(
    config: LlamaConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B 1 T 2 half"], Float[Array, "B 1 T 2 half"], Float[Array, "B 1 T 1"] | None] | None:
    """Return cosines and sines of the rotary angles at ``positions``, float32, for `rotate`; the first sines are
    negative; and the factor of the queries, if they have one. Return None for a config without rotary embedding.
    """
    if config.rope_theta is None:
        return None
    angles = positions[:, None, :, None, None].astype(jnp.float32) * rope_frequencies(config)
    sin, cos = jnp.sin(-angles if config.rope_reversed else angles), jnp.cos(angles)
    scaling, factor = config.rope_scaling, None
    if scaling is not None and scaling.attention_factor != 1.0:
        sin, cos = sin * scaling.attention_factor, cos * scaling.attention_factor
    if scaling is not None and scaling.query_beta:
        periods = (positions // scaling.original_max_position).astype(jnp.float32)
        factor = (1 + scaling.query_beta * jnp.log1p(periods))[:, None, :, None]
    # XLA's CPU compiler does not join a concatenation with its readers; it would compute cosines in every layer.
    return jnp.concatenate([cos, cos], axis=-2), jnp.concatenate([-sin, sin], axis=-2), factor


def rotate(x: Float[Array, "B h T H"], rope) -> Float[Array, "B h T H"]:
    """Rotate feature pairs (i, i + R/2) by the angle of their position, in float32.

    R is twice the number of ``rope``'s angles: all features of a head, or its first ones.
    """
    n_features = 2 * rope[0].shape[-1]
    if n_features < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :n_features], rope), x[..., n_features:]], axis=-1)
    return ops.rotate_halves(x, *rope[:2]).astype(x.dtype)


def attend(
    queries: Float[Array, "B n_heads T H"],
    segments: Sequence[KVSegment],
    softcap: float | None = None,
    sinks: Float[Array, " n_heads"] | None = None,
) -> Float[Array, "B T width"]:
    """Attend from T queries per sequence to all segments together, as if they were concatenated.

    Softmax is in float32, and the segments are not copied. The candidate tree stays out of the cache until it is
    accepted (docs/design.md 7), so verification attends to the tree's block and to the cache.

    Args:
        softcap: Scores are ``softcap * tanh(score / softcap)``, in XLA's own operations on every backend; None for no
            cap.
        sinks: A further logit of each head in the softmax, which no value belongs to (gpt-oss); None for none.

    Returns:
        The heads side by side, ``[B, T, n_heads * H]``.
    """
    rows, heads = axis_over(DATA, queries.shape[0]), axis_over(MODEL, segments[0].keys.shape[1])
    specs = P(rows, heads), [_sharding(segment, rows, heads) for segment in segments], P(heads)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    work = _attend if softcap is None else functools.partial(_attend, softcap=softcap)
    return on_each_device(work, specs, P(rows, None, heads), queries, list(segments), sinks)


def _sharding(segment: KVSegment, rows: str | None, heads: str | None) -> KVSegment:
    """Return the sharding of a segment: sequences over ``rows``, key-value heads over ``heads``."""
    visible = segment.visible
    of_rows = isinstance(visible, Filled) or (getattr(visible, "ndim", 0) == 5 and visible.shape[0] > 1)
    return KVSegment(P(rows, heads), P(rows, heads), P(rows) if of_rows else P())


def _attend(queries, segments: Sequence[KVSegment], sinks, softcap: float | None = None):
    """Compute `attend` on one device."""
    segments = sorted(segments, key=lambda segment: not isinstance(segment.visible, Causal))  # the text first
    n_tokens, visible = queries.shape[2], [segment.visible for segment in segments]
    keys = segments[0].keys
    with_cache = len(segments) == 2 and isinstance(visible[1], Filled)
    # The tree kernels read no vectors of fewer bits than the queries, and cap no scores.
    by_kernel = with_cache and keys.dtype == queries.dtype and softcap is None
    if by_kernel and (kernel := ops.here().tree_kernel(queries, keys.shape[1])):
        keys, values, mask = segments[0].with_mask()
        return kernel.attend(queries, (keys, values), mask, segments[1][:2], *visible[1], sinks=sinks)
    text_kernel = ops.here().text_kernel if sinks is None else ops.here().text_kernel_with_sinks
    given = () if sinks is None else (sinks,)
    is_long_text = n_tokens > QUERY_CHUNK and isinstance(visible[0], Causal)
    if is_long_text and len(segments) == 1 and softcap is None and (within := text_kernel(queries)):
        keys, values = (widened(vectors, queries.dtype) for vectors in segments[0][:2])
        return within(queries, keys, values, visible[0].window, *given)
    if not is_long_text:
        if softcap is None and (few := ops.here().rows_kernel(queries)):
            # The oldest first, so that a token's sum has one order in a tree and in the cache.
            parts = tuple(segment.with_mask() for segment in reversed(segments))
            return few(queries, parts, sinks, attend_plain)
        return attend_plain(queries, segments, sinks, softcap)
    chunks = -(-n_tokens // QUERY_CHUNK)
    width = -(-chunks // UNROLLED_SECTIONS) * QUERY_CHUNK
    sections = [slice(at, min(at + width, n_tokens)) for at in range(0, n_tokens, width)]
    chunked = [_attend_in_chunks(queries, segments, section, sinks, softcap) for section in sections]
    return jnp.concatenate(chunked, axis=1)


def _attend_in_chunks(queries, segments: Sequence[KVSegment], section: slice, sinks, softcap: float | None):
    """Attend from one section of a text's queries, `QUERY_CHUNK` queries at a time."""
    (keys, values, causal), *caches = segments
    # The first queries of a long text see none of its last keys: with 4 sections two fifths of the work is left out.
    seen = slice(0 if causal.window is None else max(0, section.start - causal.window + 1), section.stop)
    keys, values = jax.tree.map(lambda x: x[:, :, seen], (keys, values))

    def attend_some(queries, positions):
        text = KVSegment(keys, values, causal.rows(positions)[:, seen])
        return attend_plain(queries, [text, *(segment.seen_by(positions) for segment in caches)], sinks, softcap)

    positions = np.arange(section.start, section.stop)
    if len(positions) <= QUERY_CHUNK:
        return attend_some(queries[:, :, section], positions)
    n_chunks = -(-len(positions) // QUERY_CHUNK)
    # Repeat the last query to fill the last chunk.
    filled = np.minimum(section.start + np.arange(n_chunks * QUERY_CHUNK), section.stop - 1).reshape(n_chunks, -1)
    chunks = jnp.moveaxis(queries[:, :, filled], 2, 0)
    # Chunks do not keep scores for the gradient: together they would be the whole square.
    done = jax.lax.map(lambda chunk: jax.checkpoint(attend_some)(*chunk), (chunks, jnp.asarray(filled)))
    return jnp.moveaxis(done, 0, 1).reshape(queries.shape[0], n_chunks * QUERY_CHUNK, -1)[:, : len(positions)]


def attend_plain(queries, segments: Sequence[KVSegment], sinks=None, softcap: float | None = None):
    """Compute `attend` in XLA's own operations."""
    batch, n_heads, n_tokens, head_dim = queries.shape
    n_kv = segments[0].keys.shape[1]
    # Query heads that share a key-value head become extra rows of one matmul.
    rows = queries.reshape(batch, n_kv, (n_heads // n_kv) * n_tokens, head_dim)
    rows = rows * jnp.asarray(head_dim**-0.5, rows.dtype)
    segments = [segment if isinstance(segment.visible, SamePosition) else segment.with_mask() for segment in segments]

    def scores(segment: KVSegment):
        if isinstance(segment.visible, SamePosition):
            by_place = rows.reshape(batch, n_kv, -1, n_tokens, head_dim)
            s = jnp.einsum("bkgtd,bktd->bkgt", by_place, segment.keys, preferred_element_type=jnp.float32)
            return capped(s, softcap)[..., None]
        keys, factors = in_parts(segment.keys, rows.dtype)
        s = ops.contract("bkrd,bksd->bkrs", rows, keys, jnp.float32)
        s = s if factors is None else s * factors
        s = s.reshape(batch, n_kv, -1, n_tokens, segment.keys.shape[2])
        s = capped(s, softcap)
        # Adding is cheaper than selecting, also in the gradient, and gives exactly MASKED for masked scores.
        return s + jnp.where(segment.visible, 0.0, MASKED)

    def weighted_sum(exps, segment: KVSegment):
        if isinstance(segment.visible, SamePosition):
            return (exps * segment.values[:, :, None].astype(jnp.float32)).reshape(batch, n_kv, -1, head_dim)
        values, factors = in_parts(segment.values, rows.dtype)
        weights = exps.reshape(batch, n_kv, -1, values.shape[2])
        weights = weights if factors is None else weights * factors
        return ops.contract("bkrs,bksd->bkrd", weights.astype(values.dtype), values, jnp.float32)

    # One softmax over all segments without concatenating them: a common maximum, separate sums, and one division at the
    # end on [T, H] and not on [T, S].
    scored = [scores(segment) for segment in segments]
    peaks = [jnp.max(s, axis=-1, keepdims=True) for s in scored]
    if sinks is not None:
        sinks = sinks.reshape(n_kv, -1, 1, 1)
        peaks.append(sinks)
    peak = functools.reduce(jnp.maximum, peaks)
    peak = jax.lax.stop_gradient(peak)  # it cancels, so its gradient is zero; autodiff would compute it in full
    exps = [jnp.exp(s - peak) for s in scored]
    total = sum(jnp.sum(e, axis=-1) for e in exps)
    if sinks is not None:
        total = total + jnp.exp(sinks - peak)[..., 0]
    total = total.reshape(batch, n_kv, -1, 1)
    out = sum(weighted_sum(e, segment) for e, segment in zip(exps, segments, strict=True)) / total
    out = out.reshape(batch, n_heads, n_tokens, head_dim).astype(queries.dtype)
    return out.swapaxes(1, 2).reshape(batch, n_tokens, n_heads * head_dim)


def capped(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Return ``cap * tanh(scores / cap)``, or the scores without a cap."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def causal_mask(n_tokens: int, lengths: Int[Array, " B"] | None = None) -> Causal:
    """Return the mask by which token i attends to tokens 0..i, of texts of these lengths."""
    return Causal(n_tokens, lengths=lengths)
