"""Ranking tokens by logit, behind two functions so that a backend can have its own measured choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def best_token(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The argmax over the vocabulary, int32; ties go to the smallest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def top_tokens(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """The k best tokens in falling order, int32; ties go to the smallest id."""
    if k == 1:
        return best_token(logits)[..., None]
    return jax.lax.top_k(logits, k)[1].astype(jnp.int32)


def sampled_tokens(keys: Array, logits: Float[Array, "B *n V"], k: int) -> Int[Array, "B *n k"]:
    """k tokens drawn without replacement, in the order drawn, int32; each row from its own key ``[B]``.

    The k largest of logits with Gumbel noise are such a draw (Kool et al. 2019).
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return top_tokens(logits + noise, k)
