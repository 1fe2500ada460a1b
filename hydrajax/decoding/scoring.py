"""Log-probabilities of a given text under the base, in one forward pass."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.decoding.step import true_float32
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks, run_base
from hydrajax.ops import log_probability

TOKENS_AT_ONCE = 1024  # whose logits are in memory together


@partial(jax.jit, static_argnums=0)
def token_logprobs(
    model: BaseModel, params, tokens: Int[Array, "B T"], temperature: float | Float[Array, ""] = 1.0
) -> Float[Array, "B T"]:
    """Return the natural log-probability of each token given those before it, float32; 0 for the first.

    Args:
        model: the base.
        params: its parameters.
        tokens: int32 ``[B, T]``, right-padded; what is returned for padding has no meaning.
        temperature: divides the logits.
    """
    with true_float32(model.dtype):
        hidden = run_base(model, params, tokens).hidden
        following = jnp.roll(tokens, -1, axis=1)
        chunks = into_chunks((hidden, following), chunk_width(TOKENS_AT_ONCE, tokens.shape))
        base = BoundBase(model, params)
        found = jax.lax.map(lambda chunk: log_probability(base.logits(chunk[0]) / temperature, chunk[1]), chunks)
    found = jnp.moveaxis(found, 0, 1).reshape(len(tokens), -1)[:, : tokens.shape[1]]
    return jnp.roll(found, 1, axis=1).at[:, 0].set(0.0)
