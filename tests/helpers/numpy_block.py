"""A draft of one pass in NumPy, float64: one block after a text, written from the published definitions."""

from __future__ import annotations

import numpy as np


def rms(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotated(x, positions, theta):
    """x: [heads, tokens, head_dim]; pairs (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] / theta ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def block_hidden(drafter, params, features, ids, embedding):
    """Return the lm head's input at every slot of a block.

    Args:
        features: [S, n * D] of the text before the anchor, at positions 0 .. S - 1.
        ids: the anchor and the mask tokens.
        embedding: [V, D].
    """
    c, windows = drafter.config, drafter.windows or (0,) * drafter.config.n_layers
    p = {name: np.asarray(value, np.float64) for name, value in params.items() if not isinstance(value, dict)}
    start, size = len(features), len(ids)
    fused = rms(features @ p["fc"], np.asarray(params["hidden_norm"]["scale"], np.float64), c.norm_eps)
    x = embedding[ids].astype(np.float64)
    places = np.arange(start + size)
    for i in range(c.n_layers):
        w = params[f"layers_{i}"]

        def array(*path, w=w):
            for name in path:
                w = w[name]
            return np.asarray(w, np.float64)

        def heads(y, part, array=array):
            kernel = array("qkv")  # [D, kv, queries + 2, H]
            q = c.queries_per_kv
            chosen = {"q": kernel[:, :, :q], "k": kernel[:, :, q : q + 1], "v": kernel[:, :, q + 1 :]}[part]
            return np.einsum("td,dkqh->kqth", y, chosen).reshape(-1, len(y), c.head_dim)

        normed = rms(x, array("attention_norm", "scale"), c.norm_eps)
        both = np.concatenate([fused, normed])
        q, k, v = heads(normed, "q"), heads(both, "k"), heads(both, "v")
        q = rotated(rms(q, array("query_norm", "scale"), c.norm_eps), places[start:], c.rope_theta)
        k = rotated(rms(k, array("key_norm", "scale"), c.norm_eps), places, c.rope_theta)
        k, v = np.repeat(k, c.queries_per_kv, axis=0), np.repeat(v, c.queries_per_kv, axis=0)
        distance = places[start:, None] - places
        sees = np.ones_like(distance, bool)
        if drafter.causal or windows[i]:
            sees &= distance >= 0
        if windows[i]:
            sees &= distance < windows[i]
        scores = np.where(sees, np.einsum("hqd,hkd->hqk", q, k) / np.sqrt(c.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,hkd->qhd", weights, v).reshape(size, -1)
        x = x + out @ array("out")
        normed = rms(x, array("mlp_norm", "scale"), c.norm_eps)
        gate, up = np.einsum("td,dpm->ptm", normed, array("gate_up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ array("down")
    return rms(x, np.asarray(params["norm"]["scale"], np.float64), c.norm_eps)
