"""The distribution that sampling draws from: the base's, at a temperature, cut to its likeliest tokens.

One place for every rule and for the autoregressive baseline, so that they agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hydrajax.errors import HydrajaxError

# The nucleus is looked for among this many tokens first: a sort of a whole vocabulary takes longer than a draft head.
FEW = 1024


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
        k = None if self.top_k is None or self.top_k >= logits.shape[-1] else self.top_k
        if k is None and self.top_p == 1:
            return logits
        if k is None:
            least = _nucleus(logits, self.top_p)
        else:
            best = jax.lax.top_k(logits, k)[0]
            least = jnp.min(best, axis=-1)  # the last; but a slice makes XLA sort the whole vocabulary (jax 0.10, CPU)
            if self.top_p < 1:
                # Of those that tie with the k-th, all were kept.
                ties = jnp.sum(logits == least[..., None], axis=-1) - jnp.sum(best == least[..., None], axis=-1)
                log_z = jnp.logaddexp(jax.nn.logsumexp(best, axis=-1), least + jnp.log(ties))
                least = _least_kept(best, log_z, self.top_p)
        return jnp.where(logits >= least[..., None], logits, -jnp.inf)


def _nucleus(logits: Float[Array, "*rows V"], top_p: float) -> Float[Array, "*rows"]:
    """The smallest logit in the nucleus. Usually it is among the `FEW` largest; else everything is sorted."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    few = min(FEW, logits.shape[-1])
    best = jax.lax.top_k(logits, few)[0]
    if few == logits.shape[-1]:
        return _least_kept(best, log_z, top_p)
    enough = jnp.sum(jnp.exp(best - log_z[..., None]), axis=-1) >= top_p
    return jax.lax.cond(
        jnp.all(enough),
        lambda: _least_kept(best, log_z, top_p),
        lambda: _least_kept(-jnp.sort(-logits, axis=-1), log_z, top_p),
    )


def _least_kept(best: Float[Array, "*rows k"], log_z: Float[Array, "*rows"], top_p: float) -> Float[Array, "*rows"]:
    """Of falling logits the last that the nucleus needs: what comes before it holds less than ``top_p``."""
    probs = jnp.exp(best - log_z[..., None])
    kept = jnp.cumsum(probs, axis=-1) - probs < top_p
    kept = kept.at[..., 0].set(True)
    return jnp.take_along_axis(best, jnp.sum(kept, axis=-1, keepdims=True) - 1, axis=-1)[..., 0]


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
