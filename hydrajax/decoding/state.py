"""Everything that the decode loop carries: three pytrees of static shapes, safe to donate.

Every array's first axis is the batch, so rows can be taken out, put in and moved, as a server does whose requests come
and go.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Bool, Int

from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.processors import TokenCounts
from hydrajax.models.arrays import Array
from hydrajax.models.cache import KVCache


class Params(NamedTuple):
    """``base`` is frozen and shared; ``draft`` belongs to the drafter (an empty dict for autoregressive decoding)."""

    base: Any
    draft: Any


class TargetState(NamedTuple):
    """The base's side.

    cache: keys and values of prompt and emitted tokens.
    root:  int32 ``[B]`` the token the base has chosen and the next step emits.
    root_logprobs: its log-probability and the alternatives to it ``[B]``, None where none are wanted
           (`OutputState.logprobs`).
    """

    cache: KVCache
    root: Int[Array, " B"]
    root_logprobs: Logprobs | None = None


class OutputState(NamedTuple):
    """What has been emitted, and how the rest is to be.

    tokens:         int32 ``[B, max_new + K + 1]`` emitted tokens, garbage beyond ``lengths``. A finished row goes on
                    writing one whole path there, hence the room.
    lengths:        int32 ``[B]`` tokens emitted so far.
    limits:         int32 ``[B]`` tokens a row may emit.
    done:           bool ``[B]``.
    accept_lengths: int32 ``[B, max_new + 1]`` emitted draft tokens of each step (root not counted), -1 where the row
                    took no step.
    steps:          int32 ``[B]`` steps each row took.
    keys:           ``[B]`` each row's random key; what it draws depends on it and on the place in the row's output.
    rule:           the acceptance rule, its numbers arrays ``[B]``.
    counts:         the tokens of prompt and output, counted; None where no processor reads them.
    logprobs:       of ``tokens``, and shaped like them; None where none are wanted.
    processors:     the logits processors, their numbers arrays with the batch first.
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


class DecodeState(NamedTuple):
    """``target`` is the base's, ``draft`` the drafter's (any pytree), ``output`` the reader's."""

    target: TargetState
    draft: Any
    output: OutputState
