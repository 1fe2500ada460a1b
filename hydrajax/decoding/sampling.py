"""The distribution that sampling draws from: the base's, at a temperature, cut to its likeliest tokens.

One place for every rule and for the autoregressive baseline, so that they agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hydrajax.errors import HydrajaxError


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, in the order of transformers' warpers.

    temperature: positive. top_k: keep the k likeliest tokens, None for all. top_p: of what is left keep the fewest
    likeliest tokens that hold this share of the probability, 1.0 for all. Equally likely tokens stay or go together.

    Raises `HydrajaxError` for a value that is none of these.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 < self.temperature < float("inf"):
            raise HydrajaxError(f"temperature: must be positive, found {self.temperature}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise HydrajaxError(f"top_k: must be an integer from 1 up, found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise HydrajaxError(f"top_p: must be above 0 and at most 1, found {self.top_p}")

    def shape(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Logits of the distribution that is sampled from; -inf for the tokens that were cut off."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # The minimum is the last; but a slice makes XLA sort the whole vocabulary (jax 0.10, CPU).
            least = jnp.min(jax.lax.top_k(logits, self.top_k)[0], axis=-1, keepdims=True)
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        if self.top_p < 1:
            logits = jnp.where(_nucleus(jax.nn.softmax(logits, axis=-1), self.top_p), logits, -jnp.inf)
        return logits


def _nucleus(probs: Float[Array, "*rows V"], top_p: float) -> Bool[Array, "*rows V"]:
    """The fewest likeliest tokens that hold ``top_p``: those of at least the largest t with sum(p[p >= t]) >= top_p.

    Floats from 0 to 1 are ordered as their bits are, so t is found bit by bit, in 30 sums. For one row of 32,000 tokens
    that takes 0.3 ms, sorting it took 6.8 (jax 0.10, CPU).
    """
    probs = probs.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def try_bit(i, threshold):
        higher = threshold | (1 << (29 - i))
        held = jnp.sum(jnp.where(bits >= higher, probs, 0), axis=-1, keepdims=True)
        return jnp.where(held >= top_p, higher, threshold)

    return bits >= jax.lax.fori_loop(0, 30, try_bit, jnp.zeros_like(bits[..., :1]))


def sample(keys: Array, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """One token per row, int32, each row from its own key ``[B]``."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def row_keys(rng: Array, batch: int, first: int = 0) -> Array:
    """Keys ``[batch]``: the given ones, or of a single key one for each row number, from ``first`` on."""
    if rng.ndim == 1:
        if rng.shape != (batch,):
            raise HydrajaxError(f"rng: must be one key or one per row, found {rng.shape[0]} for {batch} rows")
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(batch))


def position_keys(keys: Array, positions: Int[Array, "B *n"]) -> Array:
    """The keys for the tokens at these places in each row's output. What a row samples there depends on nothing else:
    neither on its batch, nor on the tree and the drafter that found the tokens before it.
    """
    fold = jax.random.fold_in
    for _ in positions.shape[1:]:
        fold = jax.vmap(fold, (None, 0))
    return jax.vmap(fold)(keys, positions)
