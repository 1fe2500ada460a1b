"""Attention in NumPy and float64."""

import jax.numpy as jnp
import numpy as np

from hydrajax.models.kv_vectors import widened


def exact_attention(queries, segments, cap: float | None = None, sinks: np.ndarray | None = None) -> np.ndarray:
    """Return attention over the concatenated segments.

    Args:
        cap: scores are ``cap * tanh(score / cap)``.
        sinks: of each head, one more score, whose value is 0.
    """
    batch, heads, tokens, head_dim = queries.shape
    keys, values = (
        np.concatenate([np.asarray(widened(part[i], jnp.float32), np.float64) for part in segments], axis=2)
        for i in (0, 1)
    )
    keys, values = (np.repeat(x, heads // x.shape[1], axis=1) for x in (keys, values))
    masks = [np.asarray(part.with_mask().visible) for part in segments]
    visible = np.concatenate([np.broadcast_to(m, (batch, 1, 1, tokens, m.shape[-1])) for m in masks], axis=-1)[:, :, 0]
    scores = np.asarray(queries, np.float64) @ keys.swapaxes(2, 3) / head_dim**0.5
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    highest = np.where(visible, scores, -np.inf).max(axis=-1, keepdims=True)
    weights = np.where(visible, np.exp(scores - highest), 0)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(np.float64(sinks)[:, None, None] - highest)
    return (weights @ values / total).swapaxes(1, 2).reshape(batch, tokens, -1)
