"""Greedy and sampled rows in one batch, as in a server whose users each have their own wishes."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import ExactSampling, Greedy, penalised, walk
from hydrajax.decoding.penalties import Penalties, Seen
from hydrajax.decoding.sampling import Sampling, effective, numbers_as_arrays, sample
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.ranking import best_token


@numbers_as_arrays
@dataclass(frozen=True)
class GreedyOrExact(ExactSampling):
    """`Greedy` at temperature 0, `ExactSampling` above it; each row gives the tokens that it would give by that rule.

    A number without an effect (top_p 1, min_p 0, top_k of the whole vocabulary) leaves the logits as they are to the
    bit, also where it is an array because other rows have one that does. Raises `HydrajaxError` as `ExactSampling`,
    but for the temperature 0.
    """

    temperature: float = 0.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise HydrajaxError(f"temperature: must be at least 0 and finite, found {self.temperature}")
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        ExactSampling(**numbers | {"temperature": self.temperature or 1.0})  # refuses what it refuses

    @classmethod
    def in_full(cls, vocab_size: int, *, penalties: bool, **numbers) -> GreedyOrExact:
        """One row's rule with all its numbers as arrays, so that the rules of all rows are pytrees of one structure.

        vocab_size: top_k where all tokens are kept. penalties: whether there may be any; if not, none are counted.
        Raises `HydrajaxError` for numbers out of range.
        """
        rule = copy.copy(cls(**numbers))
        wanted = {name: getattr(rule, name) for name in ("temperature", "top_p", "min_p")}
        if penalties:
            wanted |= {name: getattr(rule, name) for name in Penalties.NEUTRAL}
        for name, value in wanted.items():
            object.__setattr__(rule, name, np.float32(value))
        object.__setattr__(rule, "top_k", np.int32(min(rule.top_k or vocab_size, vocab_size)))
        return rule

    @property
    def _samples(self) -> Bool[Array, "*B"]:
        return jnp.asarray(self.temperature) > 0

    def shape(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """As `Sampling.shape`; of a greedy row at temperature 1."""
        safe = copy.copy(self)
        object.__setattr__(safe, "temperature", jnp.where(self._samples, self.temperature, 1.0))
        if (top_p := effective(self, "top_p")) is not None:
            # Rounded probabilities may sum to 1 before the last of them: to 2 they never do.
            object.__setattr__(safe, "top_p", jnp.where(jnp.asarray(top_p) < 1, top_p, 2.0))
        return Sampling.shape(safe, logits)

    def _choose(self, keys, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
        return jnp.where(self._samples, sample(keys, self.shape(logits)), best_token(logits))

    def first_root(self, logits, keys, seen: Seen | None = None):
        logits = logits if seen is None else self.penalise(logits, seen)
        return jax.lax.cond(jnp.any(self._samples), lambda: self._choose(keys, logits), lambda: best_token(logits))

    def accept(self, logits, proposal, keys, seen: Seen | None = None):
        def choose(node, depth):
            return self._choose(keys[:, depth], penalised(self, logits, proposal, seen, node, depth))

        if seen is not None:
            return walk(proposal, choose)
        # Where nobody samples, the whole tree is judged at once.
        return jax.lax.cond(
            jnp.any(self._samples), lambda: walk(proposal, choose), lambda: Greedy().accept(logits, proposal, keys)
        )
