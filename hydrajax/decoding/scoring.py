"""Log-probabilities of a given text under the base, in one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.step import true_float32
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks, run_base
from hydrajax.ops import log_probability

TOKENS_AT_ONCE = 1024  # whose logits are in memory together


class TokenScores(NamedTuple):
    """The base's judgement of each token of a text given those before it; zeros for the first token.

    Attributes:
        logprobs: Natural log-probabilities, float32, of the tokens and of the most likely ones.
        ranks: int32 ``[B, T]``; 1 for the most likely token.
    """

    logprobs: Logprobs
    ranks: Int[Array, "B T"]


def token_scores(
    model: BaseModel, params, tokens: Int[Array, "B T"], k: int, tokens_at_once: int = TOKENS_AT_ONCE
) -> TokenScores:
    """Return the scores of tokens with the k most likely tokens in their places, see `token_logprobs`.

    Args:
        tokens_at_once: tokens whose logits are in memory together.
    """

    def judged(logits, chosen):
        own = jnp.take_along_axis(logits, chosen[..., None], axis=-1)
        return TokenScores(Logprobs.of(logits, chosen, k), 1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32))

    return _at_positions(model, params, tokens, judged, tokens_at_once)


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
    return _at_positions(
        model, params, tokens, lambda logits, chosen: log_probability(logits / temperature, chosen), TOKENS_AT_ONCE
    )


def _at_positions(model: BaseModel, params, tokens: Int[Array, "B T"], judge: Callable, tokens_at_once: int) -> Any:
    """Return the arrays ``[B, T, ...]`` of ``judge(logits, token)`` for each token; zeros for the first one."""
    with true_float32(model.dtype):
        hidden = run_base(model, params, tokens).hidden
        following = jnp.roll(tokens, -1, axis=1)
        chunks = into_chunks((hidden, following), chunk_width(tokens_at_once, tokens.shape))
        base = BoundBase(model, params)
        found = jax.lax.map(lambda chunk: judge(base.logits(chunk[0]), chunk[1]), chunks)

    def in_order(x):
        x = jnp.moveaxis(x, 0, 1).reshape(len(tokens), -1, *x.shape[3:])[:, : tokens.shape[1]]
        return jnp.roll(x, 1, axis=1).at[:, 0].set(0)

    return jax.tree.map(in_order, found)
