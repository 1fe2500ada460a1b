"""Expected tokens of a step, by choice and sequence, from the numbers of tokens accepted so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from hydrajax.scheduling.choices import StepChoice

PRIOR_RATE, PRIOR_COUNT = 0.6, 2.0  # of a draft token whose depth has not been reached yet
SHRINKAGE = 8.0  # a choice's rates count as much as all choices' together after this many steps
SEQUENCE_SHRINKAGE = 4.0  # and a sequence's own as much as the others' after this many accepted tokens
WINDOW, SEQUENCE_WINDOW = 2000.0, 32.0  # counts beyond which all are halved


class SequenceAcceptance:
    """Accepted draft tokens of one sequence, by depth, and how many the others' rates predicted for its steps."""

    def __init__(self, depth: int):
        self.counts = np.zeros((2, depth))  # accepted, predicted

    def add(self, accepted: np.ndarray, predicted: np.ndarray) -> None:
        self.counts[0] += accepted
        self.counts[1] += predicted
        if self.counts[1, 0] > SEQUENCE_WINDOW:  # a text may change, such as from prose to repetition
            self.counts *= 0.5


class Acceptance:
    """Beta counts by choice and depth, and a factor per sequence and depth.

    A draft token of depth d is tried in a step that accepted d - 1 tokens. Its rate depends on the choice, as a wider
    level accepts more. A choice that has rarely run is predicted from the rates of all choices. A sequence's factor is
    its accepted tokens over those that these rates predicted, shrunk towards 1.
    """

    def __init__(self, choices: Sequence[StepChoice]):
        self.depth = max((choice.depth for choice in choices), default=0)
        self._depths = np.array([choice.depth for choice in choices])
        self._inside = np.arange(self.depth) < self._depths[:, None]  # [C, K]
        self._counts = np.zeros((2, len(choices), self.depth))  # accepted, tried
        self._rates: np.ndarray | None = None

    def sequence(self) -> SequenceAcceptance:
        return SequenceAcceptance(self.depth)

    def rates(self) -> Float[np.ndarray, "C K"]:
        """Return the probability that a token of each depth is accepted if the one before is; 0 beyond the tree."""
        if self._rates is None:
            accepted, tried = self._counts
            pooled = (accepted.sum(0) + PRIOR_RATE * PRIOR_COUNT) / (tried.sum(0) + PRIOR_COUNT)
            self._rates = (accepted + SHRINKAGE * pooled) / (tried + SHRINKAGE) * self._inside
        return self._rates

    def expected_tokens(self, sequences: Sequence[SequenceAcceptance]) -> Float[np.ndarray, " C"]:
        """Return the expected tokens per step of all sequences together, for each choice; roots included."""
        if not self.depth:
            return np.full(len(self._depths), float(len(sequences)))
        accepted, predicted = np.stack([sequence.counts for sequence in sequences], axis=1)
        factors = (accepted + SEQUENCE_SHRINKAGE) / (predicted + SEQUENCE_SHRINKAGE)  # [B, K]
        paths = np.cumprod(np.minimum(self.rates()[:, None] * factors, 1.0), axis=2)
        return len(sequences) + paths.sum(axis=(1, 2))

    def record(
        self, choice: int, sequences: Sequence[SequenceAcceptance], accept_lengths: Int[np.ndarray, "B S"]
    ) -> None:
        """Count the steps of a burst.

        Args:
            choice: Index of the choice of all steps.
            sequences: Of each row.
            accept_lengths: Accepted draft tokens of each step; -1 for a step that is not to be counted.
        """
        if not (depth := int(self._depths[choice])):
            return
        reached = (accept_lengths[:, :, None] >= np.arange(depth + 1)).sum(axis=1)  # [B, depth + 1]
        tried, accepted = np.zeros((2, len(sequences), self.depth))
        tried[:, :depth], accepted[:, :depth] = reached[:, :-1], reached[:, 1:]
        predicted = tried * self.rates()[choice]
        for sequence, *counts in zip(sequences, accepted, predicted, strict=True):
            sequence.add(*counts)
        self._counts[0, choice] += accepted.sum(axis=0)
        self._counts[1, choice] += tried.sum(axis=0)
        if self._counts[1, choice, 0] > WINDOW:
            self._counts[:, choice] *= 0.5
        self._rates = None
