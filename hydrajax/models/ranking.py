"""Ranking and drawing tokens by their logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models import backend
from hydrajax.models.arrays import Array


def best_token(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The argmax over the vocabulary, int32; ties go to the smallest id."""
    return backend.argmax(logits)


def top_tokens(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """The k best tokens in falling order, int32; ties go to the smallest id."""
    if k == 1:
        return best_token(logits)[..., None]
    # The barrier keeps XLA from moving a caller's slice of the result into the selection. Its CPU compiler would not
    # know that for a selection any more, and sort the whole vocabulary, a hundred times as slowly.
    return jax.lax.optimization_barrier(jax.lax.top_k(logits, k)[1]).astype(jnp.int32)


def log_probability(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The natural logarithm of the probability that the logits give to a token, float32."""
    return log_probabilities(logits, tokens[..., None])[..., 0]


def log_probabilities(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """The natural logarithms of the probabilities that the logits give to some tokens, float32; none above 0."""
    # Of differences to the largest, so that the small number of a token that is nearly certain keeps its digits.
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))


def sampled_tokens(keys: Array, logits: Float[Array, "B *n V"], k: int) -> Int[Array, "B *n k"]:
    """k tokens drawn without replacement, in the order drawn, int32; each row from its own key ``[B]``.

    The k largest of logits with Gumbel noise are such a draw (Kool et al. 2019).
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return top_tokens(logits + noise, k)


def over_rows(number: float | Array, like: Float[Array, "B ..."]) -> Array:
    """A number, or one for each row ``[B]``, to be combined with ``like``, float32."""
    number = jnp.asarray(number, jnp.float32)
    return number.reshape(-1, *(1,) * (like.ndim - 1)) if number.ndim else number
