"""Attention: rotary embeddings, and one softmax over several parts of keys and values.

The base, a prefix layer and every drafter with attention of its own call the same `attend`. What they attend to is a
sequence of parts: the keys and values of the tokens fed now, and those that caches hold (`hydrajax.models.cache`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.kernels import few_rows, tree_attention
from hydrajax.models.llama_config import LlamaConfig

# Large enough that exp() underflows to zero after the row maximum is taken off, finite so that a fully
# masked row (a padding token) gives a harmless average and not NaN.
MASKED = -1e30

# Queries of a text that are attended together: with 128 a training step of 4 x 512 tokens took 1.03 s in place of 1.11
# (2 CPU cores). No more scores than theirs exist at once, so that a long prompt needs no square of them.
QUERY_CHUNK = 128
# Stretches of a text that are written out in the program, each over the keys that it sees; what is in a stretch is a
# loop. 64 chunks written out took XLA over two minutes for two layers.
UNROLLED = 16

KeyValue = tuple[Array, Array]  # keys and values of one layer, each [B, n_kv_heads, slots, head_dim]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Causal:
    """Token i of a block of ``n_tokens`` sees tokens 0..i, of these the last ``window`` if that is given.

    A few numbers in place of a mask, which for a prompt of 32,768 tokens would be a gigabyte. NumPy takes it as one.
    """

    n_tokens: int
    window: int | None = None

    def rows(self, places: Int[Array, " R"] | Int[np.ndarray, " R"]) -> Bool[Array, "R T"]:
        """What the tokens at these places see of the block."""
        xp = np if isinstance(places, np.ndarray) else jnp  # a constant, or one line of the program
        behind = places[:, None] - xp.arange(self.n_tokens)
        return (behind >= 0) if self.window is None else (behind >= 0) & (behind < self.window)

    def __array__(self, dtype=None, copy=None) -> Bool[np.ndarray, "T T"]:
        return self.rows(np.arange(self.n_tokens))


@jax.tree_util.register_static
@dataclass(frozen=True)
class SamePlace:
    """Query t sees slot t and no other: guesses about a text, of which every place has its own (EAGLE's training)."""


Mask = Bool[Array, "..."] | Causal


def windowed(
    block_mask: Mask, positions: Int[Array, "B T"], window: int | None
) -> tuple[Mask, Int[Array, "B T"] | None]:
    """What is left of a mask where a token sees the last ``window`` tokens, itself included, and the first position
    that each token still sees; None for no window, and then for all.
    """
    if window is None:
        return block_mask, None
    first_seen = positions - window + 1
    if isinstance(block_mask, Causal):  # of a text, whose positions follow each other
        return replace(block_mask, window=window), first_seen
    return block_mask & (positions[:, None, :] >= first_seen[:, :, None])[:, None, None], first_seen


class Filled(NamedTuple):
    """The slots of a cache that hold something, said in a few numbers, so that a kernel need not read the others.

    lengths: int32 ``[B]`` filled slots of each row. first_seen: the first of them that query t still sees, where a
    sliding window ends; None for all of them.
    """

    lengths: Int[Array, " B"]
    first_seen: Int[Array, "B T"] | None = None

    def seen_by(self, queries: Int[Array, " R"] | Int[np.ndarray, " R"]) -> Filled:
        """The same for some of the queries."""
        return self if self.first_seen is None else self._replace(first_seen=self.first_seen[:, queries])

    def mask(self, n_slots: int) -> Bool[Array, "B 1 1 T_or_1 S"]:
        """Whether query t of row b sees slot s."""
        slots = jnp.arange(n_slots)
        filled = (slots < self.lengths[:, None])[:, None, None, None, :]
        return filled if self.first_seen is None else filled & (slots >= self.first_seen[:, None, None, :, None])


class KVSegment(NamedTuple):
    """Some keys and values that queries may attend to, and which of them each query sees.

    keys, values: ``[B, n_kv_heads, S, head_dim]``. visible: bool, broadcastable to ``[B, 1, 1, T, S]``: whether query t
    of row b sees slot s. A static ``[T, S]`` mask is a NumPy constant and is folded into the program. `Causal` of a
    text, `Filled` of a cache, `SamePlace` of guesses about a text.
    """

    keys: Float[Array, "B kv S H"]
    values: Float[Array, "B kv S H"]
    visible: Mask | Filled | SamePlace

    def with_mask(self) -> KVSegment:
        """The same with ``visible`` as an array."""
        if isinstance(self.visible, Filled):
            return self._replace(visible=self.visible.mask(self.keys.shape[2]))
        if isinstance(self.visible, Causal):
            return self._replace(visible=np.asarray(self.visible))
        if isinstance(self.visible, SamePlace):
            return self._replace(visible=np.eye(self.keys.shape[2], dtype=bool))
        return self

    def seen_by(self, queries: Int[Array, " R"] | Int[np.ndarray, " R"]) -> KVSegment:
        """What some of the queries see of it."""
        if isinstance(self.visible, SamePlace):
            return self._replace(keys=self.keys[:, :, queries], values=self.values[:, :, queries])
        if isinstance(self.visible, Filled):
            return self._replace(visible=self.visible.seen_by(queries))
        return self._replace(visible=self.with_mask().visible[..., queries, :])


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotary angular frequencies, float32 ``[head_dim / 2]`` (radians per position), after any scaling."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    freqs = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / np.float32(scaling.factor)
    # LLaMA 3.1: wavelengths beyond the original context are stretched by `factor`, short ones are kept.
    wavelengths = 2 * np.pi / freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * freqs / scaling.factor + smooth * freqs).astype(np.float32)


def rope_table(
    config: LlamaConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B 1 T 1 half"], Float[Array, "B 1 T 2 half"]]:
    """Cosines and sines of the rotary angles at ``positions``, float32, for `rotate`; the first sines are negative."""
    angles = positions[:, None, :, None, None].astype(jnp.float32) * rope_frequencies(config)
    sin = jnp.sin(angles)
    return jnp.cos(angles), jnp.stack([-sin, sin], axis=-2).reshape(*sin.shape[:3], 2, -1)


def rotate(x: Float[Array, "B h T H"], rope) -> Float[Array, "B h T H"]:
    """Rotate feature pairs (i, i + H/2) by the angle of their position, in float32."""
    cos, sin = rope
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * sin
    return rotated.reshape(x.shape).astype(x.dtype)


def attend(queries: Float[Array, "B n_heads T H"], parts: Sequence[KVSegment]) -> Float[Array, "B T width"]:
    """Attention of T queries per row over all parts together, as if they were one sequence.

    Softmax in float32 and without copying the parts side by side. The candidate tree stays out of the cache until it is
    accepted (docs/design.md 7), so a verify attends to the block of the tree and to the cache. Returns the heads side
    by side, ``width = n_heads * H``.
    """
    parts = sorted(parts, key=lambda part: not isinstance(part.visible, Causal))  # the text first
    n_tokens, visible = queries.shape[2], [part.visible for part in parts]
    if backend.attends_tree(queries) and len(parts) == 2 and isinstance(visible[1], Filled):
        keys, values, mask = parts[0].with_mask()
        return tree_attention.attend(queries, (keys, values), mask, parts[1][:2], *visible[1])
    is_long_text = n_tokens > QUERY_CHUNK and isinstance(visible[0], Causal)
    if is_long_text and len(parts) == 1 and backend.attends_text(queries):
        return backend.attend_text(queries, parts[0].keys, parts[0].values, visible[0].window)
    if not is_long_text:
        if backend.attends_few_rows(queries):
            return few_rows.attend(queries, tuple(part.with_mask() for part in parts), attend_plain)
        return attend_plain(queries, parts)
    chunks = -(-n_tokens // QUERY_CHUNK)
    width = -(-chunks // UNROLLED) * QUERY_CHUNK
    stretches = [slice(at, min(at + width, n_tokens)) for at in range(0, n_tokens, width)]
    return jnp.concatenate([_attend_in_chunks(queries, parts, stretch) for stretch in stretches], axis=1)


def _attend_in_chunks(queries, parts: Sequence[KVSegment], stretch: slice):
    """Of the queries of a text those of one stretch, `QUERY_CHUNK` of them at a time."""
    (keys, values, causal), *caches = parts
    # The first queries of a long text see none of its last keys: with 4 stretches two fifths of the work is left out.
    seen = slice(0 if causal.window is None else max(0, stretch.start - causal.window + 1), stretch.stop)
    keys, values = keys[:, :, seen], values[:, :, seen]

    def attend_some(queries, places):
        text = KVSegment(keys, values, causal.rows(places)[:, seen])
        return attend_plain(queries, [text, *(part.seen_by(places) for part in caches)])

    places = np.arange(stretch.start, stretch.stop)
    if len(places) <= QUERY_CHUNK:
        return attend_some(queries[:, :, stretch], places)
    n_chunks = -(-len(places) // QUERY_CHUNK)
    # The last query again and again, to fill the last chunk.
    filled = np.minimum(stretch.start + np.arange(n_chunks * QUERY_CHUNK), stretch.stop - 1).reshape(n_chunks, -1)
    chunks = jnp.moveaxis(queries[:, :, filled], 2, 0)
    # No chunk's scores are kept for a gradient: together they would be the whole square again.
    done = jax.lax.map(lambda chunk: jax.checkpoint(attend_some)(*chunk), (chunks, jnp.asarray(filled)))
    return jnp.moveaxis(done, 0, 1).reshape(queries.shape[0], n_chunks * QUERY_CHUNK, -1)[:, : len(places)]


def attend_plain(queries, parts: Sequence[KVSegment]):
    """`attend` in XLA's own operations."""
    batch, n_heads, n_tokens, head_dim = queries.shape
    n_kv = parts[0].keys.shape[1]
    # Query heads that share a key-value head become extra rows of one matmul.
    rows = queries.reshape(batch, n_kv, (n_heads // n_kv) * n_tokens, head_dim)
    rows = rows * jnp.asarray(head_dim**-0.5, rows.dtype)
    parts = [part if isinstance(part.visible, SamePlace) else part.with_mask() for part in parts]

    def scores(part: KVSegment):
        if isinstance(part.visible, SamePlace):
            by_place = rows.reshape(batch, n_kv, -1, n_tokens, head_dim)
            return jnp.einsum("bkgtd,bktd->bkgt", by_place, part.keys, preferred_element_type=jnp.float32)[..., None]
        s = backend.contract("bkrd,bksd->bkrs", rows, part.keys, jnp.float32)
        s = s.reshape(batch, n_kv, -1, n_tokens, part.keys.shape[2])
        # Adding costs less than choosing, also for the gradient, and a masked score is MASKED to the last bit as well.
        return s + jnp.where(part.visible, 0.0, MASKED)

    def weighted_sum(exps, part: KVSegment):
        if isinstance(part.visible, SamePlace):
            return (exps * part.values[:, :, None].astype(jnp.float32)).reshape(batch, n_kv, -1, head_dim)
        weights = exps.reshape(batch, n_kv, -1, part.values.shape[2]).astype(part.values.dtype)
        return backend.contract("bkrs,bksd->bkrd", weights, part.values, jnp.float32)

    # One softmax over all parts without concatenating them: a common maximum, separate sums, and one division at the
    # end on [T, H] and not on [T, S]. On a CPU this is 20% faster for a 64-node tree than softmax over the
    # concatenation.
    scored = [scores(part) for part in parts]
    peak = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s in scored])
    peak = jax.lax.stop_gradient(peak)  # it cancels out, so its gradient is zero, which autodiff would compute in full
    exps = [jnp.exp(s - peak) for s in scored]
    total = sum(jnp.sum(e, axis=-1) for e in exps).reshape(batch, n_kv, -1, 1)
    out = sum(weighted_sum(e, part) for e, part in zip(exps, parts, strict=True)) / total
    out = out.reshape(batch, n_heads, n_tokens, head_dim).astype(queries.dtype)
    return out.swapaxes(1, 2).reshape(batch, n_tokens, n_heads * head_dim)


def causal_mask(n_tokens: int) -> Causal:
    """Token i of a block sees tokens 0..i."""
    return Causal(n_tokens)
