"""The distribution that sampling draws from: the base's, at a temperature, cut to its most likely tokens.

One place for every rule and for the autoregressive baseline, so that they agree to the bit. The numbers of a rule may
be Python numbers, which hold for all rows, or arrays with one number per row (`hydrajax.decoding.numbers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.numbers import effective, is_mixed
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.ranking import best_token, over_rows

NEUTRAL: dict[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0}


def check_temperature(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise HydrajaxError(f"{name}: must be positive, found {value}")


def check_cuts(numbers: Any) -> None:
    """Refuse ``top_k``, ``top_p`` or ``min_p`` out of range."""
    if numbers.top_k is not None and (type(numbers.top_k) is not int or numbers.top_k < 1):
        raise HydrajaxError(f"top_k: must be an integer from 1 up, found {numbers.top_k}")
    if not 0 < numbers.top_p <= 1:
        raise HydrajaxError(f"top_p: must be above 0 and at most 1, found {numbers.top_p}")
    if not 0 <= numbers.min_p <= 1:
        raise HydrajaxError(f"min_p: must be from 0 to 1, found {numbers.min_p}")


def shaped(numbers: Any, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Return the logits of the distribution that is sampled from; -inf for the tokens that were cut off.

    Temperature, then top-k, then top-p, then min-p, in the order of transformers' warpers. numbers: anything with these
    four. Where they are arrays ``[B]``, the logits' first axis is B. Rows at temperature 0 are shaped at temperature 1.
    """
    temperature = numbers.temperature
    if is_mixed(numbers):
        temperature = jnp.where(jnp.asarray(temperature) > 0, temperature, 1.0)
    logits = logits / over_rows(temperature, logits)
    if (top_k := effective(numbers, "top_k")) is not None:
        kept = _among_largest(logits, jnp.ones_like(logits), over_rows(top_k, logits))
        logits = jnp.where(kept, logits, -jnp.inf)
    if (top_p := effective(numbers, "top_p")) is not None:
        if is_mixed(numbers):
            # Rounded probabilities may sum to 1 before the last of them; they never sum to 2.
            top_p = jnp.where(jnp.asarray(top_p) < 1, top_p, 2.0)
        probs = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(_among_largest(probs, probs, over_rows(top_p, logits)), logits, -jnp.inf)
    if (min_p := effective(numbers, "min_p")) is not None:
        # A ratio of probabilities is a difference of logits, whatever the others sum to.
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(over_rows(min_p, logits))
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


@dataclass(frozen=True)
class Sampling:
    """The numbers of the rules that draw from the base's distribution.

    temperature: 0 for the most likely token (greedy), else positive. top_k: keep the k most likely tokens, None for
    all. top_p: of what is left keep the fewest tokens that hold this share of the probability, the most likely first,
    1.0 for all. min_p: of what is left keep the tokens that are at least this many times as likely as the most likely
    one, 0.0 for all (Nguyen et al. 2024). Equally likely tokens stay or go together.

    A row with a number without effect gives the tokens that it would give without that number, to the bit, also where
    the numbers are arrays because other rows' have one. Raises `HydrajaxError` for a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = field(default=0.0, kw_only=True)
    NEUTRAL: ClassVar[dict[str, Any]] = NEUTRAL
    draws: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise HydrajaxError(f"temperature: must be at least 0 and finite, found {self.temperature}")
        check_cuts(self)
        if self.temperature == 0:
            object.__setattr__(self, "mixed", True)

    def shape(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Return `shaped` logits."""
        return shaped(self, logits)

    def sampled_rows(self) -> Bool[Array, "*B"]:
        """Return which rows of a mixed batch are sampled; the others, at temperature 0, are greedy."""
        return jnp.asarray(self.temperature) > 0

    def choose(self, keys: Array, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        """Draw one token per row, or take the most likely one in rows at temperature 0."""
        drawn = sample(keys, self.shape(logits))
        return jnp.where(self.sampled_rows(), drawn, best_token(logits)) if is_mixed(self) else drawn


def _among_largest(
    values: Float[Array, "*rows V"], weights: Float[Array, "*rows V"], wanted: Array
) -> Bool[Array, "*rows V"]:
    """Mark the fewest largest values whose weights sum to at least ``wanted``, and those equal to the least of them.

    With weights of one these are the k largest, with probabilities that weigh what they are the nucleus of top-p.

    Floats are ordered as their bits are, once those of negative ones are turned round, so the least of them is found
    bit by bit, in 32 sums. For the nucleus of one row of 32,000 tokens that takes 0.3 ms, sorting it took 6.8 (jax
    0.10, CPU); and `jax.lax.top_k` wants one k that is known when the program is compiled.
    """
    weights = weights.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32) + 0.0, jnp.uint32)  # -0.0 becomes 0.0
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def try_bit(i, least):
        higher = least | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        held = jnp.sum(jnp.where(ordered >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(held >= wanted, higher, least)

    return ordered >= jax.lax.fori_loop(0, 32, try_bit, jnp.zeros_like(ordered[..., :1]))


def sample(keys: Array, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draw one token per row, int32, each row from its own key ``[B]``."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


# --- random keys ------------------------------------------------------------------------------------------------------


def row_keys(rng: Array, batch: int, first: int = 0) -> Array:
    """Return keys ``[batch]``: the given ones, or of a single key one for each row number, from ``first`` on.

    Keys of `jax.random.PRNGKey`, uint32 ``[2]`` or ``[batch, 2]``, are accepted too.
    """
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.dtype != jnp.uint32 or rng.ndim not in (1, 2):
            raise HydrajaxError(f"rng: must be a jax.random.key, or one per row, found {rng.dtype} {list(rng.shape)}")
        rng = jax.random.wrap_key_data(rng)
    if rng.ndim == 1:
        if rng.shape != (batch,):
            raise HydrajaxError(f"rng: must be one key or one per row, found {rng.shape[0]} for {batch} rows")
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(batch))


def position_keys(keys: Array, positions: Int[Array, " B *n"]) -> Array:
    """Return the keys for the tokens at these places in each row's output.

    What a row samples there depends on nothing else: neither on its batch, nor on the tree and the drafter that found
    the tokens before it.
    """
    fold = jax.random.fold_in
    for _ in positions.shape[1:]:
        fold = jax.vmap(fold, (None, 0))
    return jax.vmap(fold)(keys, positions)
