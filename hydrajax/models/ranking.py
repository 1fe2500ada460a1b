"""Rank and draw tokens by their logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models import backend, per_device
from hydrajax.models.arrays import Array


def best_token(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the argmax over the vocabulary, int32; ties go to the smallest id."""
    return top_tokens(logits, 1)[..., 0]


def top_tokens(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return the k best tokens in descending order, int32; ties go to the smallest id."""
    return per_device.over_vocabulary(_top, logits, k)


def _top(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    if k == 1:
        return backend.argmax(logits)[..., None]
    # The barrier keeps XLA from moving a caller's slice into the selection: its CPU compiler would then sort the whole
    # vocabulary, a hundred times slower.
    return jax.lax.optimization_barrier(backend.top_k(logits, k))


def log_probability(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the natural log-probability of a token, float32."""
    return log_probabilities(logits, tokens[..., None])[..., 0]


def log_probabilities(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """Return the natural log-probabilities of some tokens, float32, at most 0."""
    # From differences to the largest logit, so that small log-probabilities keep their digits.
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))


def sampled_tokens(keys: Array, logits: Float[Array, "B *n V"], k: int) -> Int[Array, "B *n k"]:
    """Draw k tokens without replacement, in order, int32; each sequence from its own key ``[B]``.

    The k largest logits with Gumbel noise are such a draw (Kool et al. 2019).
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return top_tokens(logits + noise, k)


def over_rows(number: float | Array, like: Float[Array, "B ..."]) -> Array:
    """Return a number, or one per sequence ``[B]``, in a shape that broadcasts against ``like``, float32."""
    number = jnp.asarray(number, jnp.float32)
    return number.reshape(-1, *(1,) * (like.ndim - 1)) if number.ndim else number
