"""Attention: rotary embeddings, and one softmax over several parts of keys and values.

The base, a prefix layer and every drafter with attention of its own call the same `attend`. What they attend to is a
sequence of parts: the keys and values of the tokens fed now, and those that caches hold (`hydrajax.models.cache`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.config import LlamaConfig
from hydrajax.models.kernels import few_rows

# Large enough that exp() underflows to zero after the row maximum is taken off, finite so that a fully
# masked row (a padding token) gives a harmless average and not NaN.
MASKED = -1e30

# Queries of a static mask that are attended together: with 128 a training step of 4 x 512 tokens took 1.03 s in place
# of 1.11 (2 CPU cores).
QUERY_CHUNK = 128

KeyValue = tuple[Array, Array]  # keys and values of one layer, each [B, n_kv_heads, slots, head_dim]


class Part(NamedTuple):
    """Some keys and values that queries may attend to, and which of them each query sees.

    keys, values: ``[B, n_kv_heads, S, head_dim]``. visible: bool, broadcastable to ``[B, 1, 1, T, S]``: whether query t
    of row b sees slot s. A static ``[T, S]`` mask is a NumPy constant and is folded into the program.
    """

    keys: Float[Array, "B kv S H"]
    values: Float[Array, "B kv S H"]
    visible: Bool[Array, "..."] | Bool[np.ndarray, "..."]


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


def attend(queries: Float[Array, "B n_heads T H"], parts: Sequence[Part]) -> Float[Array, "B T width"]:
    """Attention of T queries per row over all parts together, as if they were one sequence.

    Softmax in float32 and without copying the parts side by side. The candidate tree stays out of the cache until it is
    accepted (docs/design.md 7), so a verify attends to the block of the tree and to the cache. Returns the heads side
    by side, ``width = n_heads * H``.
    """
    n_tokens = queries.shape[2]
    if backend.attends_few_rows(queries):
        return few_rows.attend(queries, tuple(parts), attend_plain)
    if n_tokens <= QUERY_CHUNK or len(parts) > 1 or not isinstance(parts[0].visible, np.ndarray):
        return attend_plain(queries, parts)
    # Of a long text the first queries see none of the last keys: with 4 chunks two fifths of the work is left out.
    chunks = [slice(i, i + QUERY_CHUNK) for i in range(0, n_tokens, QUERY_CHUNK)]
    return jnp.concatenate([attend_plain(queries[:, :, rows], [_seen_by(parts[0], rows)]) for rows in chunks], axis=1)


def attend_plain(queries, parts: Sequence[Part]):
    """`attend` in XLA's own operations."""
    batch, n_heads, n_tokens, head_dim = queries.shape
    n_kv = parts[0].keys.shape[1]
    # Query heads that share a key-value head become extra rows of one matmul.
    rows = queries.reshape(batch, n_kv, (n_heads // n_kv) * n_tokens, head_dim)
    rows = rows * jnp.asarray(head_dim**-0.5, rows.dtype)

    def scores(part: Part):
        s = backend.contract("bkrd,bksd->bkrs", rows, part.keys, jnp.float32)
        s = s.reshape(batch, n_kv, -1, n_tokens, part.keys.shape[2])
        # Adding costs less than choosing, also for the gradient, and a masked score is MASKED to the last bit as well.
        return s + jnp.where(part.visible, 0.0, MASKED)

    def weighted_sum(exps, values):
        weights = exps.reshape(batch, n_kv, -1, values.shape[2]).astype(values.dtype)
        return backend.contract("bkrs,bksd->bkrd", weights, values, jnp.float32)

    # One softmax over all parts without concatenating them: a common maximum, separate sums, and one division at the
    # end on [T, H] and not on [T, S]. On a CPU this is 20% faster for a 64-node tree than softmax over the
    # concatenation.
    scored = [scores(part) for part in parts]
    peak = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s in scored])
    peak = jax.lax.stop_gradient(peak)  # it cancels out, so its gradient is zero, which autodiff would compute in full
    exps = [jnp.exp(s - peak) for s in scored]
    total = sum(jnp.sum(e, axis=-1) for e in exps).reshape(batch, n_kv, -1, 1)
    out = sum(weighted_sum(e, part.values) for e, part in zip(exps, parts, strict=True)) / total
    out = out.reshape(batch, n_heads, n_tokens, head_dim).astype(queries.dtype)
    return out.swapaxes(1, 2).reshape(batch, n_tokens, n_heads * head_dim)


def _seen_by(part: Part, rows: slice) -> Part:
    """The part as some of the queries see it, without the slots behind the last one that any of them sees."""
    visible = part.visible[rows]
    end = np.flatnonzero(visible.any(axis=0)).max(initial=0) + 1
    return Part(part.keys[:, :, :end], part.values[:, :, :end], visible[:, :end])


def causal_mask(n_tokens: int) -> Bool[np.ndarray, "T T"]:
    """Token i of a block sees tokens 0..i."""
    return np.tri(n_tokens, dtype=bool)
