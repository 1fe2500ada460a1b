"""Forward passes over whole rows of tokens without a cache, for training and calibration."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.models.arrays import Array
from hydrajax.models.attention import Documents, causal_mask
from hydrajax.models.base_model import BaseModel, BoundBase, Forward


def row_layout(tokens: Int[Array, "B T"], segments: Int[Array, "B T"] | None = None):
    """Return ``(positions int32 [B, T], mask)`` of one sequence per row, or of the documents packed into it.

    Packed documents start at position 0 each and attend only to themselves; their mask is bool ``[B, 1, 1, T, T]``,
    otherwise it is `hydrajax.models.attention.Causal`.
    """
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    causal = causal_mask(tokens.shape[1])
    if segments is None:
        return steps, causal
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    positions = steps - jax.lax.cummax(jnp.where(starts, steps, 0), axis=1)
    same = segments[:, :, None] == segments[:, None, :]
    return positions, (same & np.asarray(causal))[:, None, None]


def run_base(
    model: BaseModel,
    base_params,
    tokens: Int[Array, "B T"],
    aux_hidden_layers: tuple[int, ...] = (0,),
    segments: Int[Array, "B T"] | None = None,
    rng: Array | None = None,
) -> Forward:
    """Run the base over rows of tokens; see `row_layout`, `BaseModel` and `BoundBase` for the arguments."""
    positions, mask = row_layout(tokens, segments)
    mask = mask if segments is None else Documents(mask)
    return BoundBase(model, base_params, rng).forward(tokens, positions, mask, aux_hidden_layers=aux_hidden_layers)


def chunk_width(chunk_tokens: int, shape: tuple[int, int]) -> int:
    """Return positions per chunk, so that B rows hold about ``chunk_tokens`` tokens and the last chunk is not short."""
    batch, length = shape
    chunks = -(-length // max(chunk_tokens // batch, 1))
    return -(-length // chunks)


def into_chunks(arrays: Any, width: int) -> Any:
    """Return every array ``[B, T, ...]`` as ``[chunks, B, width, ...]``, padded at the end with zeros (False)."""

    def split(x):
        batch, length, *rest = x.shape
        chunks = -(-length // width)
        x = jnp.pad(x, ((0, 0), (0, chunks * width - length), *((0, 0) for _ in rest)))
        return jnp.moveaxis(x.reshape(batch, chunks, width, *rest), 1, 0)  # B stays whole: it may be sharded

    return jax.tree.map(split, arrays)
