"""Exact sampling, and the distribution that sampling draws from: the base's, at a temperature and truncated.

All rules and the autoregressive baseline share this code and agree to the bit. The parameters of a rule may be Python
numbers, which apply to all sequences, or arrays with one number per sequence (`hydrajax.decoding.parameters`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import Greedy, JudgesBestGuesses, walk
from hydrajax.decoding.parameters import (
    LARGEST,
    LARGEST_NUMBER,
    LEAST_SHARE,
    LEAST_TEMPERATURE,
    bound,
    effective,
    is_mixed,
    parameters_as_arrays,
)
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.ops import best_token, over_rows, sampled_tokens

NEUTRAL: dict[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
TOP_K = {"none": (-1, 0)}  # values of JSON that mean None


def check_temperature(parameters: Any, name: str = "temperature") -> None:
    """Check and bound a temperature that cannot be 0; raises `HydrajaxError`."""
    value = getattr(parameters, name)
    if not 0 < value < float("inf"):
        raise HydrajaxError(f"{name}: got {value}, expected a positive number")
    bound(parameters, **{name: (LEAST_TEMPERATURE, LARGEST_NUMBER)})


def check_cuts(parameters: Any) -> None:
    """Check and bound ``top_k``, ``top_p`` and ``min_p``; raises `HydrajaxError`."""
    if parameters.top_k is not None and (type(parameters.top_k) is not int or parameters.top_k < 1):
        raise HydrajaxError(f"top_k: got {parameters.top_k}, expected an integer from 1 up")
    if not 0 < parameters.top_p <= 1:
        raise HydrajaxError(f"top_p: got {parameters.top_p}, expected above 0 and at most 1")
    if not 0 <= parameters.min_p <= 1:
        raise HydrajaxError(f"min_p: got {parameters.min_p}, expected a number from 0 to 1")
    bound(parameters, top_k=(1, int(LARGEST)), top_p=(LEAST_SHARE, 1))


def shaped(parameters: Any, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Return the logits of the sampled distribution; -inf for truncated tokens.

    Temperature, then top-k, top-p and min-p, in the order of transformers' warpers. Sequences at temperature 0 are
    shaped at temperature 1.

    Args:
        parameters: An object with these four. If they are arrays ``[B]``, the first axis of the logits is B.
        logits: Float logits.
    """
    temperature = parameters.temperature
    if is_mixed(parameters):
        temperature = jnp.where(jnp.asarray(temperature) > 0, temperature, 1.0)
    logits = logits / over_rows(temperature, logits)
    if (top_k := effective(parameters, "top_k")) is not None:
        kept = _among_largest(logits, jnp.ones_like(logits), over_rows(top_k, logits))
        logits = jnp.where(kept, logits, -jnp.inf)
    if (top_p := effective(parameters, "top_p")) is not None:
        if is_mixed(parameters):
            # Rounded probabilities may sum to 1 before the last of them; they never sum to 2.
            top_p = jnp.where(jnp.asarray(top_p) < 1, top_p, 2.0)
        probs = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(_among_largest(probs, probs, over_rows(top_p, logits)), logits, -jnp.inf)
    if (min_p := effective(parameters, "min_p")) is not None:
        # A ratio of probabilities is a difference of logits.
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(over_rows(min_p, logits))
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of rules that draw from the base's distribution.

    A parameter without effect leaves a sequence's tokens unchanged to the bit, also in arrays that other sequences
    use. Equally likely tokens are kept or truncated together.

    Attributes:
        temperature: 0 for the most likely token (greedy), else positive. Less than `LEAST_TEMPERATURE` is 0.
        top_k: Keep the k most likely tokens; None for all.
        top_p: Then keep the fewest tokens that hold this share of the probability, most likely first; 1.0 for all.
        min_p: Then keep tokens that are at least this fraction as likely as the most likely one; 0.0 for all (Nguyen et
            al. 2024).

    Raises:
        HydrajaxError: For a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = field(default=None, metadata=TOP_K)
    top_p: float = 1.0
    min_p: float = field(default=0.0, kw_only=True)
    NEUTRAL: ClassVar[dict[str, Any]] = NEUTRAL
    SERVED: ClassVar[dict[str, Any]] = {"temperature": 0.0}  # of a request to a server that gives none
    draws: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise HydrajaxError(f"temperature: got {self.temperature}, expected a finite number from 0 up")
        bound(self, temperature=(0, LARGEST_NUMBER))
        check_cuts(self)
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "mixed", True)

    def shape(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Return `shaped` logits."""
        return shaped(self, logits)

    def sampled_rows(self) -> Bool[Array, "*B"]:
        """Return which sequences of a mixed batch are sampled; the others, at temperature 0, are greedy."""
        return jnp.asarray(self.temperature) > 0

    def choose(self, keys: Array, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        """Draw one token per sequence, or take the most likely one at temperature 0."""
        drawn = sample(keys, self.shape(logits))
        return jnp.where(self.sampled_rows(), drawn, best_token(logits)) if is_mixed(self) else drawn


def _among_largest(
    values: Float[Array, "*rows V"], weights: Float[Array, "*rows V"], wanted: Array
) -> Bool[Array, "*rows V"]:
    """Mark the fewest largest values whose weights sum to at least ``wanted``, and all values equal to the least of
    them.

    With weights of one these are the k largest; with probabilities as weights, the nucleus of top-p.

    The order of floats is that of their bits (negative ones inverted), so the least value is found bit by bit in 32
    sums, faster than by sorting. `jax.lax.top_k` needs a k that is known at compile time.
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
    """Draw one token per sequence, int32, each from its own key ``[B]``."""
    return sampled_tokens(keys, logits, 1)[..., 0]


@parameters_as_arrays
@dataclass(frozen=True)
class ExactSampling(Sampling, JudgesBestGuesses):
    """Sample from the base's distribution at a node and move to the child that holds the sample, if there is one.

    The output has the base's own distribution, as processors and `Sampling` shape it, for any draft (docs/design.md 3):
    each token is a sample of the base given the text before it, and the tree only decides how many of them one step
    finds. Without a tree this is plain sampling with the same tokens (up to rounding). Sequences at temperature 0 get
    the tokens of `Greedy`, also in a batch with others.
    """

    same_output: ClassVar[bool] = True

    def baseline(self):
        return self

    def first_root(self, logits, keys):
        if not is_mixed(self):
            return self.choose(keys, logits)
        some = jnp.any(self.sampled_rows())
        return jax.lax.cond(some, lambda: self.choose(keys, logits), lambda: best_token(logits))

    def accept(self, verify_result, keys):
        def node_by_node():
            return walk(
                verify_result.proposal, lambda node, depth: self.choose(keys[:, depth], verify_result.at(node, depth))
            )

        if not is_mixed(self):
            return node_by_node()
        # If no sequence samples and no processor is active, judge the whole tree at once.
        some = jnp.any(self.sampled_rows())
        if verify_result.processors:
            some |= ~verify_result.unprocessed()
        plain = verify_result._replace(processors=(), counts=None)
        return jax.lax.cond(some, node_by_node, lambda: Greedy().accept(plain, keys))
