"""The state of the decode loop: three pytrees of static shapes, safe to donate.

Every array's first axis is the batch, so a server can insert, remove and move sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxtyping import Bool, Int

from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.processors import TokenCounts
from hydrajax.models.arrays import Array
from hydrajax.models.cache import KVCache


class Params(NamedTuple):
    """Parameters: ``base`` is frozen and shared; ``draft`` belongs to the drafter (an empty dict without a draft)."""

    base: Any
    draft: Any

    def __repr__(self) -> str:
        """Count the parameters. The default would fetch and print the weights."""
        return f"Params(base={_summary(self.base)}, draft={_summary(self.draft)})"


def _summary(tree: Any) -> str:
    """Describe a pytree of parameters in a few words, from shapes; other small pytrees as they are."""
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(hasattr(leaf, "dtype") and hasattr(leaf, "size") for leaf in leaves):
        return repr(tree)
    dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    return f"<{sum(leaf.size for leaf in leaves):,} parameters in {len(leaves)} arrays of {dtypes}>"


class TargetState(NamedTuple):
    """The base's part.

    Attributes:
        cache: Keys and values of prompt and emitted tokens.
        root: int32 ``[B]`` the token that the base has chosen and the next step emits.
        root_logprobs: The root's log-probability and its alternatives ``[B]``; None if not requested.
    """

    cache: KVCache
    root: Int[Array, " B"]
    root_logprobs: Logprobs | None = None


class OutputState(NamedTuple):
    """The emitted tokens, and the parameters for the rest.

    Attributes:
        tokens: int32 ``[B, max_new + K + 1]`` emitted tokens, garbage beyond ``lengths``. A finished sequence still
            writes one whole path per step there, which explains the extra room.
        lengths: int32 ``[B]`` emitted tokens.
        limits: int32 ``[B]`` maximum number of tokens.
        done: bool ``[B]``.
        accept_lengths: int32 ``[B, max_new + 1]`` emitted draft tokens of each step (root not counted), -1 for steps
            that a sequence did not take.
        steps: int32 ``[B]`` steps taken.
        keys: ``[B]`` random keys. A draw depends on the key and on the position in the output.
        rule: The acceptance rule, its numbers arrays ``[B]``.
        counts: Token counts of prompt and output; None if no processor reads them.
        logprobs: Log-probabilities of ``tokens``, of the same shape; None if not requested.
        processors: The logits processors, their numbers arrays with the batch first.
        ignore_eos: bool ``[B]`` EOS does not end the sequence; None for no sequence.
    """

    tokens: Int[Array, "B room"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    done: Bool[Array, " B"]
    accept_lengths: Int[Array, "B max_steps"]
    steps: Int[Array, " B"]
    keys: Array
    rule: Any
    counts: TokenCounts | None = None
    logprobs: Logprobs | None = None
    processors: tuple[Any, ...] = ()
    ignore_eos: Bool[Array, " B"] | None = None


class DecodeState(NamedTuple):
    """The state of a batch: ``target`` of the base, ``draft`` of the drafter (any pytree), ``output`` of the emitted
    text.
    """

    target: TargetState
    draft: Any
    output: OutputState
