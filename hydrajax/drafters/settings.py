"""Settings of trained draft heads: the base classes of the drafters' ``Settings``, and their checks.

The fields are keys of the section ``draft`` of a training file, and messages use these names. A ``Settings`` refuses
values that are out of range or contradict each other; the drafter's ``for_base`` refuses those that do not fit the
base.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.models.llama_config import LlamaConfig


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise not_allowed(name, value, allowed)


def at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:  # so that NaN is refused too
        raise HydrajaxError(f"{name}: got {value}, expected at least {least}")


def below(name: str, value: float, limit: float) -> None:
    if not 0 <= value < limit:
        raise HydrajaxError(f"{name}: got {value}, expected at least 0 and less than {limit}")


def within_base(name: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise HydrajaxError(f"{name}: got {value}, expected at most the base's {limit} {what}")


@dataclass(frozen=True)
class Settings:
    """Base class of the drafters' settings. Every field has a default, and a name has one meaning in all of them."""


@dataclass(frozen=True)
class HeadSettings(Settings):
    """``num_draft_heads`` heads of ``n_layers`` blocks each.

    Attributes:
        lm_head: ``full``, a product of rank ``lm_rank`` (``low_rank``), or the base's own (``shared``), of which
            decoding multiplies clusters of tokens alone with ``clustered`` (`hydrajax.drafters.clusters`). Heads with
            any but the first, or with a vocabulary, are saved in hydrajax's own format.
        vocabulary: The number of tokens that the draft can propose: the most frequent targets of the training text, or
            those of the heads to start from. None for all. With ``shared``, each step multiplies with the base's lm
            head for these tokens alone.
    """

    num_draft_heads: int = 4
    n_layers: int = 1
    lm_head: str = "full"
    lm_rank: int | None = None
    vocabulary: int | None = None

    def __post_init__(self):
        one_of("draft.lm_head", self.lm_head, ("full", "shared", "clustered", "low_rank"))
        if (self.lm_head == "low_rank") != (self.lm_rank is not None):
            raise HydrajaxError("draft.lm_rank: expected with draft.lm_head low_rank and with no other")
        at_least("draft.lm_rank", self.lm_rank, 1)
        at_least("draft.num_draft_heads", self.num_draft_heads, 1)
        at_least("draft.n_layers", self.n_layers, 1)
        at_least("draft.vocabulary", self.vocabulary, 1)

    def small_lm_head(self, base: LlamaConfig, target_counts: Int[np.ndarray, " V"] | None) -> LmHead | None:
        """Return the lm head of these settings; None for the drafter's own. See `vocabulary_of`."""
        vocabulary = vocabulary_of(self.vocabulary, base, target_counts)
        if self.lm_head == "full" and vocabulary is None:
            return None
        clustered = self.lm_head == "clustered"
        shared = clustered or self.lm_head == "shared"
        return LmHead(shared=shared, rank=self.lm_rank, vocabulary=vocabulary, clustered=clustered)


def vocabulary_of(
    size: int | None, base: LlamaConfig, target_counts: Int[np.ndarray, " V"] | None
) -> Vocabulary | None:
    """Return the vocabulary of the ``size`` most frequent tokens; None for all.

    Args:
        size: Number of tokens; None for all.
        target_counts: How often each token id is a target in the training text; None takes the smallest ids, if only
            sizes matter.
    """
    if size is None:
        return None
    within_base("draft.vocabulary", size, base.vocab_size, "tokens")
    counts = np.zeros(base.vocab_size, int) if target_counts is None else target_counts
    return Vocabulary.most_frequent(counts, size)
