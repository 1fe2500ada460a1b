"""The choices of a user who trains draft heads: the base classes of the drafters' ``Settings``, and their checks.

The fields of a ``Settings`` are keys of the section ``draft`` in a training file, and messages name them so. It refuses
values that are out of range or contradict each other; the drafter's ``for_base`` refuses what does not fit the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.drafters.draft_lm_head import LmHead, Vocabulary
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.models.llama_config import LlamaConfig


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise not_allowed(name, value, allowed)


def at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # so that NaN is refused too
        raise HydrajaxError(f"{name}: must be at least {least}, found {value}")


def below(name: str, value: float, limit: float) -> None:
    if not 0 <= value < limit:
        raise HydrajaxError(f"{name}: must be from 0 up to, not including, {limit}, found {value}")


def within_base(name: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise HydrajaxError(f"{name}: must be at most the base's {limit} {what}, found {value}")


@dataclass(frozen=True)
class Settings:
    """Base class of the drafters' settings. Every field has a default, and one of a name means the same in all."""


@dataclass(frozen=True)
class HeadSettings(Settings):
    """``num_draft_heads`` heads of ``n_layers`` blocks each.

    lm_head:    ``full``, a product of rank ``lm_rank`` (``low_rank``), or the base's own (``shared``). Heads with the
                latter two, or with a vocabulary, are saved in hydrajax's own format.
    vocabulary: the number of tokens that the draft can propose: the most frequent targets of the training text, or
                those of the heads to start from. None for all.
    """

    num_draft_heads: int = 4
    n_layers: int = 1
    lm_head: str = "full"
    lm_rank: int | None = None
    vocabulary: int | None = None

    def __post_init__(self):
        one_of("draft.lm_head", self.lm_head, ("full", "shared", "low_rank"))
        if (self.lm_head == "low_rank") != (self.lm_rank is not None):
            raise HydrajaxError("draft.lm_rank: is needed for draft.lm_head low_rank, and means nothing for the others")
        at_least("draft.lm_rank", self.lm_rank, 1)
        at_least("draft.num_draft_heads", self.num_draft_heads, 1)
        at_least("draft.n_layers", self.n_layers, 1)
        at_least("draft.vocabulary", self.vocabulary, 1)
        if self.vocabulary is not None and self.lm_head == "shared":
            raise HydrajaxError("draft.vocabulary: contradicts draft.lm_head shared, the base's own, which knows all")

    def small_lm_head(self, base: LlamaConfig, target_counts: Int[np.ndarray, " V"] | None) -> LmHead | None:
        """Return the lm head that they describe; None for the drafter's own. target_counts: see `vocabulary_of`."""
        vocabulary = vocabulary_of(self.vocabulary, base, target_counts)
        if self.lm_head == "full" and vocabulary is None:
            return None
        return LmHead(shared=self.lm_head == "shared", rank=self.lm_rank, vocabulary=vocabulary)


def vocabulary_of(
    size: int | None, base: LlamaConfig, target_counts: Int[np.ndarray, " V"] | None
) -> Vocabulary | None:
    """Return the vocabulary of the ``size`` most frequent tokens; None for all.

    target_counts: how often each token id is a target in the training text; None takes the smallest ids, where only the
    sizes matter.
    """
    if size is None:
        return None
    within_base("draft.vocabulary", size, base.vocab_size, "tokens")
    counts = np.zeros(base.vocab_size, int) if target_counts is None else target_counts
    return Vocabulary.most_frequent(counts, size)
