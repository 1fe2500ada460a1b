"""Key map of latent attention: rotated features, which files may have in pairs, are halves in ours."""

from __future__ import annotations

import numpy as np

from hydrajax.models.layout import Entry, Layout, Parameter, Path, Shape, same, transposed
from hydrajax.models.llama_config import LlamaConfig


def latent_attention(path: Path, prefix: str, c: LlamaConfig) -> Layout:
    """Return the key map of one layer (`hydrajax.models.latent_attention.LatentAttention`), as `decoder_layer` does."""
    s, path, prefix = c.latent, (*path, "latent"), f"{prefix}self_attn."
    by_head = (c.n_heads, s.nope_dim + s.value_dim, s.rank)
    inputs, name = (c.width, "q_proj") if s.query_rank is None else (s.query_rank, "q_b_proj")
    heads = (c.n_heads, s.key_dim, inputs)
    parts, back = _order(s.nope_dim, c)
    layout = [
        _latents((*path, "latents"), prefix, "weight", c, (c.width,)),
        same((*path, "latent_norm", "scale"), f"{prefix}kv_a_layernorm.weight", s.rank),
        Entry(
            ((*path, "queries"),),
            {f"{prefix}{name}.weight": (c.n_heads * s.key_dim, inputs)},
            lambda x: (Parameter(tuple(x.reshape(heads)[:, part] for part in parts), axis=1, order=(2, 0, 1)),),
            lambda ours: (ours.transpose(1, 2, 0)[:, back].reshape(-1, inputs),),
        ),
        Entry(
            ((*path, "key_up"), (*path, "value_up")),
            {f"{prefix}kv_b_proj.weight": (c.n_heads * by_head[1], s.rank)},
            lambda x: tuple(Parameter((part,)) for part in np.split(x.reshape(by_head), [s.nope_dim], axis=1)),
            lambda *ours: (np.concatenate(ours, axis=1).reshape(-1, s.rank),),
        ),
        transposed((*path, "out"), f"{prefix}o_proj.weight", c.width, c.n_heads * s.value_dim),
    ]
    if s.query_rank is not None:
        layout.append(same((*path, "query_norm", "scale"), f"{prefix}q_a_layernorm.weight", s.query_rank))
    if c.qkv_bias:
        layout.append(_latents((*path, "latents_bias"), prefix, "bias", c, ()))
    if c.out_bias:
        layout.append(same((*path, "out_bias"), f"{prefix}o_proj.bias", c.width))
    return layout


def _latents(path: Path, prefix: str, kind: str, c: LlamaConfig, inputs: Shape) -> Entry:
    """Fuse the projections to latents: ours are ``[*inputs, (queries' latent, latent, rotated key)]``."""
    rank, (parts, back) = c.latent.query_rank, _order(c.latent.rank, c)
    rows = ({"q_a_proj": rank} if rank else {}) | {"kv_a_proj_with_mqa": c.latent.kept_dim}

    def join(*theirs):
        joined = (*theirs[:-1], *(theirs[-1][part] for part in parts))
        return (Parameter(joined, order=(1, 0) if inputs else None),)

    def split(fused):
        *of_queries, latents = np.split(fused.T, [rank] if rank else [])
        return (*of_queries, latents[back])

    return Entry((path,), {f"{prefix}{name}.{kind}": (size, *inputs) for name, size in rows.items()}, join, split)


def _order(first: int, c: LlamaConfig) -> tuple[tuple[slice, ...], np.ndarray]:
    """Return the parts of files' features that are ours, where those from ``first`` on are rotated; and the order in
    which ours are theirs.
    """
    parts = (slice(first), slice(first, None, 2), slice(first + 1, None, 2)) if c.latent.interleaved else (slice(None),)
    features = np.arange(first + c.latent.rope_dim)
    return parts, np.argsort(np.concatenate([features[part] for part in parts]))
