"""Penalties for tokens that a text holds already, and the counts of its tokens that they need.

A penalty is part of the base's distribution: at a node of a tree it depends on everything before that node, which is
the prompt, what has been emitted, and the path from the root to the node. `acceptance.penalised` puts these together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.sampling import effective
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.ranking import over_rows


class Seen(NamedTuple):
    """Which tokens a text holds.

    prompt: bool ``[B, V]`` whether a token is in the prompt; in a conversation that is everything before the answer.
    output: int32 ``[B, V]`` how often each has been emitted.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]

    @classmethod
    def of_prompt(cls, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], vocab_size: int) -> Seen:
        """After the first ``lengths[b]`` tokens of each row; padding may hold anything."""
        nothing = jnp.zeros((len(tokens), vocab_size), jnp.int32)
        return cls(nothing > 0, nothing).with_prompt(tokens, lengths)

    def with_prompt(self, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> Seen:
        """With more text to answer: what has been emitted is then prompt, and so are the first ``counts[b]`` tokens."""
        rows, columns = self._places(tokens, counts)
        prompt = (self.prompt | (self.output > 0)).at[rows, columns].set(True, mode="drop")
        return Seen(prompt, jnp.zeros_like(self.output))

    def with_output(self, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> Seen:
        """After the first ``counts[b]`` of these tokens, too."""
        rows, columns = self._places(tokens, counts)
        return self._replace(output=self.output.at[rows, columns].add(1, mode="drop"))

    def _places(self, tokens, counts):
        """Where to write, for ``mode="drop"``: tokens beyond the counts are sent beyond the vocabulary."""
        valid = jnp.arange(tokens.shape[1]) < counts[:, None]
        return jnp.arange(len(tokens))[:, None], jnp.where(valid, tokens, self.output.shape[1])


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Numbers of a rule that change the base's logits for tokens seen before, ahead of any temperature.

    repetition_penalty: positive, 1.0 for none. Positive logits of the tokens of prompt and output are divided by it,
        negative ones multiplied (Keskar et al. 2019; transformers' processor of this name).
    presence_penalty, frequency_penalty: finite, 0.0 for none; negative ones favour what was said. Subtracted from the
        logits of the tokens of the output, once and as often as a token occurs there (the formula of OpenAI's API). The
        prompt does not count. They come after repetition_penalty, as in vLLM.

    Each is a number or, in a decode state, one for each row. Raises `HydrajaxError` for a value that is none of these.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    NEUTRAL: ClassVar[dict[str, float]] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

    def __post_init__(self):
        if not 0 < self.repetition_penalty < float("inf"):
            raise HydrajaxError(f"repetition_penalty: must be positive, found {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise HydrajaxError(f"{name}: must be a finite number, found {getattr(self, name)}")

    @property
    def penalises(self) -> bool:
        """Whether any of them has an effect, so that a decode must count its tokens."""
        return any(effective(self, name) is not None for name in Penalties.NEUTRAL)

    def penalise(self, logits: Float[Array, "B V"], seen: Seen) -> Float[Array, "B V"]:
        """The logits of the token that follows what has been seen."""
        said = seen.output > 0
        if (penalty := effective(self, "repetition_penalty")) is not None:
            penalty = over_rows(penalty, logits)
            changed = jnp.where(logits < 0, logits * penalty, logits / penalty)
            logits = jnp.where(seen.prompt | said, changed, logits)
        if (penalty := effective(self, "frequency_penalty")) is not None:
            logits = logits - over_rows(penalty, logits) * seen.output
        if (penalty := effective(self, "presence_penalty")) is not None:
            logits = logits - over_rows(penalty, logits) * said
        return logits
