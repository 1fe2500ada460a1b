"""Logits processors of a batch: their interface, and how the decode step applies them.

A processor is part of the base's distribution, so every rule applies it alike. Its effect at a node may depend on all
tokens before: the prompt, the output, and the path from the root to the node.

A processor is a frozen, hashable dataclass of sampling parameters. `LogitsProcessor.batched` combines those of several
sequences into one with arrays, which lies in the decode state. `hydrajax.decoding.processors` has ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax import plugins
from hydrajax.models.arrays import Array

# Classes that flags, keywords and JSON construct by the names of their fields, in the order of application (vLLM's).
PROCESSORS = plugins.Group("processors")


class TokenCounts(NamedTuple):
    """Token counts of a text.

    Attributes:
        prompt: bool ``[B, V]`` whether a token occurs in the prompt (in a conversation: in everything before the
            answer).
        output: int32 ``[B, V]`` how often each token has been emitted.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]

    @classmethod
    def of_prompt(cls, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], vocab_size: int) -> TokenCounts:
        """Count the first ``lengths[b]`` tokens of each sequence; padding may hold anything."""
        nothing = jnp.zeros((len(tokens), vocab_size), jnp.int32)
        return cls(nothing > 0, nothing).with_prompt(tokens, lengths)

    @classmethod
    def of_text(cls, ids: Int[np.ndarray, " T"], vocab_size: int) -> TokenCounts:
        """Count the tokens of one text as its prompt, on the host: a new length compiles nothing."""
        prompt = np.zeros((1, vocab_size), bool)
        prompt[0, ids] = True
        return cls(jnp.asarray(prompt), jnp.asarray(np.zeros(prompt.shape, np.int32)))

    def with_prompt(self, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> TokenCounts:
        """Add the first ``counts[b]`` tokens to the prompt; what has been emitted becomes prompt too."""
        rows, columns = self._places(tokens, counts)
        prompt = (self.prompt | (self.output > 0)).at[rows, columns].set(True, mode="drop")
        return TokenCounts(prompt, jnp.zeros_like(self.output))

    def with_output(self, tokens: Int[Array, "B T"], counts: Int[Array, " B"]) -> TokenCounts:
        """Add the first ``counts[b]`` of these tokens to the output."""
        rows, columns = self._places(tokens, counts)
        return self._replace(output=self.output.at[rows, columns].add(1, mode="drop"))

    def _places(self, tokens, counts):
        """Return indices for ``mode="drop"``: tokens beyond the counts get an id beyond the vocabulary."""
        valid = jnp.arange(tokens.shape[1]) < counts[:, None]
        return jnp.arange(len(tokens))[:, None], jnp.where(valid, tokens, self.output.shape[1])


class NodeContext(NamedTuple):
    """The context of the processed logits: one node of each sequence.

    Attributes:
        node: int32 ``[B]``; 0 after a prompt.
        counts: Token counts of the prompt, the output, and the path from the root to the node. None unless a processor
            of the batch has ``counts_tokens``.
    """

    node: Int[Array, " B"]
    counts: TokenCounts | None = None


class LogitsProcessor(Protocol):
    """A change to the logits of one node per sequence. Constructed without arguments it has no effect.

    Attributes:
        counts_tokens: It reads `NodeContext.counts`.
    """

    counts_tokens: ClassVar[bool]

    def __call__(self, logits: Float[Array, "B V"], context: NodeContext) -> Float[Array, "B V"]:
        """Return the processed logits. The processor's parameters are arrays ``[B]`` here."""

    def reference(
        self, logits: Float[np.ndarray, " V"], prompt: Sequence[int], output: Sequence[int]
    ) -> Float[np.ndarray, " V"]:
        """Return one sequence's processed logits, computed token by token in NumPy: the reference of certificates and
        tests.
        """

    def active(self) -> Bool[Array, ""]:
        """Return whether it changes any sequence, on the device."""

    @property
    def has_effect(self) -> bool:
        """True if it changes anything, on the host."""

    @classmethod
    def batched(cls, rows: Sequence[Any], vocab_size: int, like: Sequence[Any] = ()) -> Any:
        """Return one processor for a batch from one per sequence, its arrays with the batch as first axis.

        Args:
            rows: The processors of the sequences.
            vocab_size: The base's.
            like: Give the result the structure that it would have with these in the batch.
        """


def batched_processors(
    rows: Sequence[Sequence[Any]], vocab_size: int, like: Sequence[Sequence[Any]] = ()
) -> tuple[Any, ...]:
    """Return the processors of a batch from those of each sequence; a sequence without one gets it without effect.

    Args:
        rows: The processors of the sequences.
        vocab_size: The base's.
        like: Give the result the structure that it would have with these sequences in the batch.
    """
    every = (*rows, *like)
    if not any(every):
        return ()  # without importing the named ones
    kinds = dict.fromkeys((*PROCESSORS.values(), *(type(one) for row in every for one in row)))
    found = []
    for cls in kinds:
        if any(isinstance(one, cls) for row in every for one in row):
            own, others_like = ([_of_kind(cls, row) for row in some] for some in (rows, like))
            found.append(cls.batched(own, vocab_size, others_like))
    return tuple(found)


def _of_kind(cls: type, processors: Sequence[Any]) -> Any:
    """Return the processor of this class, or one without effect."""
    return next((one for one in processors if isinstance(one, cls)), None) or cls()


def process(processors: Sequence[Any], logits: Float[Array, "B V"], context: NodeContext) -> Float[Array, "B V"]:
    """Apply the processors of a batch in order."""
    for processor in processors:
        logits = processor(logits, context)
    return logits


def count_tokens(processors: Sequence[Any]) -> bool:
    """Return whether any of the processors reads token counts."""
    return any(processor.counts_tokens for processor in processors)
