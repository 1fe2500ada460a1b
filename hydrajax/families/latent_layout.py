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
    layout = [
        _latents((*path, "latents"), prefix, "weight", c, (c.width,)),
        same((*path, "latent_norm", "scale"), f"{prefix}kv_a_layernorm.weight", s.rank),
        Entry(
            ((*path, "queries"),),
            {f"{prefix}{name}.weight": (c.n_heads * s.key_dim, inputs)},
            lambda x: (Parameter(_parts(x.reshape(heads), s.nope_dim, c), axis=1, order=(2, 0, 1)),),
            lambda ours: (_in_files(ours.transpose(1, 2, 0), s.nope_dim, c).reshape(-1, inputs),),
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
    s, rows = c.latent, {}
    if s.query_rank is not None:
        rows["q_a_proj"] = s.query_rank
    rows["kv_a_proj_with_mqa"] = s.kept_dim

    def join(*parts):
        *of_queries, latents = (x[None] for x in parts)
        joined = tuple(x[0] for x in (*of_queries, *_parts(latents, s.rank, c)))
        return (Parameter(joined, order=(1, 0) if inputs else None),)

    def split(fused):
        *of_queries, latents = np.split(fused.T, [s.query_rank] if s.query_rank else [])
        return (*of_queries, _in_files(latents[None], s.rank, c)[0])

    return Entry((path,), {f"{prefix}{name}.{kind}": (size, *inputs) for name, size in rows.items()}, join, split)


def _parts(x: np.ndarray, first: int, c: LlamaConfig) -> tuple[np.ndarray, ...]:
    """Return the features of heads ``[h, features, ...]``, of which those from ``first`` on are rotated, in the order
    of ours.
    """
    return (x[:, :first], x[:, first::2], x[:, first + 1 :: 2]) if c.latent.interleaved else (x,)


def _in_files(x: np.ndarray, first: int, c: LlamaConfig) -> np.ndarray:
    """Return the features of `_parts` in the order of files."""
    x, middle = np.array(x), first + c.latent.rope_dim // 2
    if c.latent.interleaved:
        x[:, first::2], x[:, first + 1 :: 2] = x[:, first:middle].copy(), x[:, middle:].copy()
    return x
