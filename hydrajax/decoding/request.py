"""`Request`: the parameters of one sequence. `SamplingParams` are the arrays of a batch of requests."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.batching import batched
from hydrajax.decoding.constraints import Constraint, GrammarLike
from hydrajax.decoding.processing import batched_processors
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.models.arrays import Array
from hydrajax.text.jsonl import shown

SEED_BITS = 32  # of a JAX key without 64-bit mode


def check_max_new_tokens(value: int) -> int:
    """Return the limit if it is at least 1, else raise `HydrajaxError`."""
    if value < 1:
        raise HydrajaxError(f"max_new_tokens: got {value}, expected at least 1")
    return value


@dataclass(frozen=True)
class Request:
    """The parameters of one sequence: a frozen value.

    Another request compiles a new program only if its rule or processors are of another kind, or if one of their
    parameters has an effect that had none before.

    Attributes:
        rule: Judges the verified tree.
        processors: Change the base's logits before the rule reads them (`hydrajax.decoding.processors`).
        max_new_tokens: Maximum number of tokens; prompt and output must also fit the context.
        grammar: The texts that may be generated.
        stop: Strings that end the text, which ends before the first of them.
        stop_token_ids: Tokens that end the text as EOS does.
        include_stop_str_in_output: The text ends after the stop string or the token.
        seed: For rules that sample; None draws one.
        number: The prompt's number among those with this seed, on which its sample depends.
        ignore_eos: EOS does not end the sequence.

    Raises:
        HydrajaxError: For an invalid field.
    """

    rule: AcceptanceRule = field(default_factory=Greedy)
    processors: Sequence[Any] = ()
    max_new_tokens: int = 256
    grammar: GrammarLike | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    seed: Any = None  # an integer; `checked_seed` refuses everything else
    number: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        check_max_new_tokens(self.max_new_tokens)
        if isinstance(self.stop, str):
            raise HydrajaxError("stop: got one string, expected a list; write [string]")
        for name in ("processors", "stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_seed(self.seed))
        kinds = [type(one).__name__ for one in self.processors]
        if twice := [name for index, name in enumerate(kinds) if name in kinds[:index]]:
            raise HydrajaxError(f"processors: got {twice[0]} twice, expected one of a kind")

    @property
    def stops(self) -> bool:
        """True if strings or tokens other than EOS end the text."""
        return bool(self.stop or self.stop_token_ids)

    def check(self, vocab_size: int) -> None:
        """Raise `HydrajaxError` for token ids beyond the vocabulary."""
        for token in self.stop_token_ids:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
                raise HydrajaxError(
                    f"stop_token_ids: got {shown(token)}, expected token ids from 0 to {vocab_size - 1}"
                )
        batched_processors([self.processors], vocab_size)

    def replace(self, **changes: Any) -> Request:
        return dataclasses.replace(self, **changes)

    def with_seed(self) -> Request:
        """Return the request with a seed: a new one for None, None for a rule without randomness."""
        if not self.rule.draws:
            return self.replace(seed=None)
        return self.replace(seed=secrets.randbits(SEED_BITS)) if self.seed is None else self

    def shown_rule(self) -> str:
        """Return the rule with its parameters, and the processors, as reports record them."""
        return " with ".join([str(self.rule), *map(str, self.processors)])


def checked_seed(seed: Any) -> int:
    """Return a seed as an int; raises `HydrajaxError` for one that `jax.random.key` would wrap or refuse."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**SEED_BITS:
        raise HydrajaxError(f"seed: got {one_line(repr(seed), 40)}, expected an integer from 0 to {2**SEED_BITS - 1}")
    return number


class SamplingParams(NamedTuple):
    """The arrays of a batch of requests: arguments of the program, so other values do not recompile.

    Attributes:
        rng: A random key, or one per sequence ``[B]``. A sequence's draws depend only on its key; a single key is
            folded with the sequence's number.
        rule: The acceptance rule, its parameters arrays ``[B]``.
        processors: The logits processors, their parameters arrays ``[B]``.
        limits: int32 ``[B]`` maximum number of tokens, at most the program's; None for the program's.
        ignore_eos: bool ``[B]`` EOS does not end the sequence; None for no sequence.
        constraints: One per sequence, None for a sequence without; for the stepped executor alone, which copies them.
            They stay on the host. None for the grammar of the executor's own request.
    """

    rng: Array
    rule: AcceptanceRule
    processors: tuple[Any, ...] = ()
    limits: Int[Array, " B"] | None = None
    ignore_eos: Bool[Array, " B"] | None = None
    constraints: tuple[Constraint | None, ...] | None = None


def sampling_params(
    requests: Sequence[Request], rng: Array, vocab_size: int, like: Sequence[Request] = ()
) -> SamplingParams:
    """Return the sampling parameters of a batch from its requests, whose rules are of one kind.

    Args:
        requests: One per sequence.
        rng: A random key, or one per sequence.
        vocab_size: The base's.
        like: Give the result the structure that it would have with these in the batch, so that all batches share a
            program.
    """
    every = (*requests, *like)
    return SamplingParams(
        rng,
        batched([request.rule for request in requests], [request.rule for request in like]),
        batched_processors(
            [request.processors for request in requests], vocab_size, [request.processors for request in like]
        ),
        np.array([request.max_new_tokens for request in requests], np.int32),
        np.array([one.ignore_eos for one in requests]) if any(one.ignore_eos for one in every) else None,
    )
