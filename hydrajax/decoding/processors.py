"""Logits processors change the base's logits at a node of the tree before any rule reads them.

A program without processors contains nothing of this module. `hydrajax.decoding.processing` is their interface.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

from hydrajax.decoding.batching import batched
from hydrajax.decoding.parameters import LARGEST_NUMBER, bound, effective, parameters_as_arrays
from hydrajax.drafters.draft_lm_head import is_allowed
from hydrajax.errors import HydrajaxError, integer_in
from hydrajax.models.arrays import Array
from hydrajax.ops import over_rows
from hydrajax.text.jsonl import shown


class NumericProcessor:
    """Base of processors whose parameters are numbers, with their values without effect in ``NEUTRAL``.

    A subclass is a frozen dataclass under `hydrajax.decoding.parameters.parameters_as_arrays`. It defines ``__call__``
    and ``reference``. Its name in `hydrajax.plugins` makes its fields keywords, flags and fields of JSON.
    """

    NEUTRAL: ClassVar[dict[str, float]]
    counts_tokens: ClassVar[bool] = False

    @property
    def has_effect(self):
        return any(effective(self, name) is not None for name in self.NEUTRAL)

    def active(self):
        found = jnp.asarray(False)
        for name, neutral in self.NEUTRAL.items():
            if (value := effective(self, name)) is not None:
                found |= jnp.any(jnp.asarray(value) != neutral)
        return found

    @classmethod
    def batched(cls, rows, vocab_size, like=()):
        return batched(rows, like)


@parameters_as_arrays
@dataclass(frozen=True, kw_only=True)
class Penalties(NumericProcessor):
    """Penalise (or favour) tokens that the text already contains.

    Numbers beyond `LARGEST_NUMBER` have the effect of `LARGEST_NUMBER`.

    Attributes:
        repetition_penalty: Positive, 1.0 for none. Divides positive logits of tokens of prompt and output, multiplies
            negative ones (Keskar et al. 2019; transformers' processor of this name).
        presence_penalty: Finite, 0.0 for none; negative values favour repetition. Subtracted once from the logits of
            tokens of the output (the formula of OpenAI's API). The prompt does not count. Applied after
            repetition_penalty, as in vLLM.
        frequency_penalty: As presence_penalty, once per occurrence.

    Raises:
        HydrajaxError: For a value out of range.
    """

    repetition_penalty: float = field(
        default=1.0, metadata={"help": "divide the logits of tokens of the prompt and the output by R", "metavar": "R"}
    )
    presence_penalty: float = field(
        default=0.0, metadata={"help": "subtract R from the logits of tokens of the output", "metavar": "R"}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "subtract R per occurrence of a token in the output", "metavar": "R"}
    )
    NEUTRAL: ClassVar[dict[str, float]] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    counts_tokens: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 < self.repetition_penalty < float("inf"):
            raise HydrajaxError(f"repetition_penalty: got {self.repetition_penalty}, expected a positive number")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -math.inf < getattr(self, name) < math.inf:
                raise HydrajaxError(f"{name}: got {getattr(self, name)}, expected a finite number")
            bound(self, **{name: (-LARGEST_NUMBER, LARGEST_NUMBER)})
        bound(self, repetition_penalty=(1 / LARGEST_NUMBER, LARGEST_NUMBER))

    def __call__(self, logits, context):
        counts = context.counts
        emitted = counts.output > 0
        if (penalty := effective(self, "repetition_penalty")) is not None:
            penalty = over_rows(penalty, logits)
            changed = jnp.where(logits < 0, logits * penalty, logits / penalty)
            logits = jnp.where(counts.prompt | emitted, changed, logits)
        if (penalty := effective(self, "frequency_penalty")) is not None:
            logits = logits - over_rows(penalty, logits) * counts.output
        if (penalty := effective(self, "presence_penalty")) is not None:
            logits = logits - over_rows(penalty, logits) * emitted
        return logits

    def reference(self, logits, prompt, output):
        found = np.array(logits)
        for token in {int(token) for token in (*prompt, *output)}:
            found[token] *= self.repetition_penalty if found[token] < 0 else 1 / self.repetition_penalty
        for token in output:
            found[token] -= self.frequency_penalty
        for token in {int(token) for token in output}:
            found[token] -= self.presence_penalty
        return found


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class MinTokens:
    """Forbid EOS among the first tokens of the output (vLLM's ``min_tokens``).

    Attributes:
        min_tokens: Tokens without EOS; in a decode state int32 ``[B]``.
        eos_ids: The same for all sequences of a batch.
    """

    min_tokens: Any = 0
    eos_ids: tuple[int, ...] = ()
    counts_tokens: ClassVar[bool] = True

    @property
    def has_effect(self):
        return self.min_tokens > 0

    def active(self):
        return jnp.any(self.min_tokens > 0)

    def __call__(self, logits, context):
        early = jnp.sum(context.counts.output, axis=1) < self.min_tokens
        ids = jnp.asarray(self.eos_ids, jnp.int32)
        return logits.at[:, ids].set(jnp.where(early[:, None], -jnp.inf, logits[:, ids]))

    def reference(self, logits, prompt, output):
        found = np.array(logits)
        if len(output) < self.min_tokens:
            found[list(self.eos_ids)] = -np.inf
        return found

    @classmethod
    def batched(cls, rows, vocab_size, like=()):
        eos_ids = next(one.eos_ids for one in (*rows, *like) if one.eos_ids)
        return cls(np.array([row.min_tokens for row in rows], np.int32), eos_ids)

    def tree_flatten(self):
        return (self.min_tokens,), self.eos_ids

    @classmethod
    def tree_unflatten(cls, eos_ids, leaves):
        return cls(leaves[0], eos_ids)


def _parse_bias(text: str) -> dict[int, float]:
    """Parse ``ID:BIAS,ID:BIAS``; raises ValueError."""
    try:
        return {integer_in(token.strip()): float(bias) for token, bias in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        raise ValueError("expected ID:B,ID:B,...") from None


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class LogitBias:
    """Add a number to the logits of some tokens, as OpenAI's ``logit_bias`` does, or of all but some.

    Attributes:
        logit_bias: A mapping, or pairs, of token ids and finite numbers, bounded by `LARGEST_NUMBER`; in a decode state
            float32 ``[B, V]``.
        allowed_token_ids: All other tokens get ``-LARGEST_NUMBER`` (vLLM's field of this name); None allows all.

    Raises:
        HydrajaxError: For anything else; `batched` raises it for ids outside the vocabulary.
    """

    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | Any = field(
        default=(),
        metadata={
            "help": "add B to the logits of token ID",
            "metavar": "ID:B,...",
            "parse": _parse_bias,
            "json": dict[str, float],
            "json_range": (-100, 100),  # OpenAI's
        },
    )
    allowed_token_ids: Sequence[int] | None = field(
        default=None,
        metadata={
            "help": "generate these tokens only",
            "metavar": "ID,...",
            "parse": lambda text: [integer_in(token.strip()) for token in text.split(",")],
            "json": list[int],
        },
    )
    counts_tokens: ClassVar[bool] = False

    def __post_init__(self):
        if (allowed := self.allowed_token_ids) is not None:
            try:
                ids = tuple(sorted({operator.index(token) for token in allowed}))
            except TypeError:
                ids = ()
            if not ids or ids[0] < 0:
                raise HydrajaxError(f"allowed_token_ids: got {shown(allowed)}, expected token ids")
            object.__setattr__(self, "allowed_token_ids", ids)
        given = self.logit_bias
        try:
            pairs = given.items() if isinstance(given, Mapping) else given
            pairs = tuple(sorted((_token_id(token), float(bias)) for token, bias in pairs))
        except (TypeError, ValueError, OverflowError):
            raise HydrajaxError(f"logit_bias: got {shown(given)}, expected token ids with numbers") from None
        for token, bias in pairs:
            if token < 0 or not math.isfinite(bias):
                raise HydrajaxError(f"logit_bias: got {token}: {bias}, expected ids from 0 up with finite numbers")
        pairs = tuple((token, min(max(bias, -LARGEST_NUMBER), LARGEST_NUMBER)) for token, bias in pairs)
        object.__setattr__(self, "logit_bias", pairs)

    @property
    def has_effect(self):
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    def with_bias(self, more: Mapping[int, float]) -> LogitBias:
        """Return the processor with other biases of some tokens."""
        return replace(self, logit_bias={**dict(self.logit_bias), **more})

    def active(self):
        return jnp.any(self.logit_bias != 0)

    def __call__(self, logits, context):
        return logits + self.logit_bias

    def reference(self, logits, prompt, output):
        return logits + LogitBias.batched([self], len(logits)).logit_bias[0]

    @classmethod
    def batched(cls, rows, vocab_size, like=()):
        bias = np.zeros((len(rows), vocab_size), np.float32)
        for row, processor in zip(bias, rows, strict=True):
            pairs, allowed = processor.logit_bias, processor.allowed_token_ids or ()
            for name, ids in (("logit_bias", [token for token, _ in pairs]), ("allowed_token_ids", allowed)):
                if ids and ids[-1] >= vocab_size:
                    raise HydrajaxError(f"{name}: got token id {ids[-1]}, expected 0 to {vocab_size - 1}")
            if allowed:
                row[:] = -LARGEST_NUMBER
                row[list(allowed)] = 0
            for token, number in pairs:
                row[token] += number
        return cls.tree_unflatten(None, (bias,))

    def tree_flatten(self):
        return (self.logit_bias,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        found = object.__new__(cls)
        object.__setattr__(found, "logit_bias", leaves[0])
        object.__setattr__(found, "allowed_token_ids", None)
        return found


def _token_id(token: Any) -> int:
    """Return a token id given as an integer or, as JSON's keys are, as text."""
    if isinstance(token, bool) or (isinstance(token, float) and not token.is_integer()):
        raise ValueError
    return integer_in(token) if isinstance(token, str) else int(token)


class AllowedTokens(NamedTuple):
    """Forbid all tokens except some after each node, such as those that a grammar allows.

    Attributes:
        allowed: uint32 ``[B, N, W]``: token t is bit t % 32 of word t // 32. The host computes it for the nodes of one
            proposal (`hydrajax.decoding.stepped.SteppedExecutor`), so it is not part of a request.
    """

    allowed: UInt32[Array, "B N W"]
    counts_tokens = False

    def active(self):
        return jnp.asarray(True)

    def __call__(self, logits, context):
        words = self.allowed[jnp.arange(len(logits)), context.node]
        return jnp.where(is_allowed(words, logits.shape[1]), logits, -jnp.inf)
