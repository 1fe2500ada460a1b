"""The verification outcomes for which the draft model drafts ahead. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from hydrajax.errors import HydrajaxError

MOST_OUTCOMES = 1024  # each is one token in every pass that drafts ahead
DEFAULT_BUDGET = 12


@dataclass(frozen=True)
class FanOut:
    """The number of bonus tokens to guess at each accept length 0 .. K of a chain.

    A verification outcome is an accept length and the base's bonus token. The guesses are the draft model's likeliest
    tokens, in order: after a rejected token without that token, after the whole chain all of them. With only zeros the
    speculation cache is empty, and base and draft take turns.

    Raises:
        HydrajaxError: for negative counts, or more than `MOST_OUTCOMES` in total.
    """

    counts: tuple[int, ...]

    def __post_init__(self):
        if not self.counts or min(self.counts) < 0 or self.total > MOST_OUTCOMES:
            raise HydrajaxError(
                f"fan_out: got {list(self.counts)}, expected one count from 0 up for each accept length, "
                f"at most {MOST_OUTCOMES} in total"
            )

    @classmethod
    def from_budget(cls, depth: int, budget: int = DEFAULT_BUDGET) -> FanOut:
        """Return ``budget`` outcomes, for an acceptance rate of 2/3 and `power_law` with exponent 1."""
        if not 0 <= budget <= MOST_OUTCOMES:
            raise HydrajaxError(f"fan_out: got {budget}, expected 0 to {MOST_OUTCOMES}")
        return cls.likeliest(power_law(depth, 2 / 3, 1.0, ranks=max(budget, 1)), budget)

    @classmethod
    def likeliest(
        cls, probabilities: Float[np.ndarray, "accept rank"] | Sequence[Sequence[float]], budget: int
    ) -> FanOut:
        """Return the ``budget`` likeliest outcomes, which maximise the hit rate.

        Args:
            probabilities: ``[K+1, R]`` joint probability of each accept length and of the guess of each rank. Adjacent
                ranks whose measured values rise are averaged, because a probability must not rise with the rank.
            budget: number of outcomes; outcomes of probability 0 are left out.
        """
        found = np.array([_non_increasing(row) for row in probabilities])
        order = np.argsort(-found, axis=None, kind="stable")[: max(budget, 0)]
        order = order[found.reshape(-1)[order] > 0]
        counts = np.bincount(order // found.shape[1], minlength=found.shape[0])
        return cls(tuple(int(count) for count in counts))

    @property
    def total(self) -> int:
        """F, the number of outcomes in the speculation cache."""
        return sum(self.counts)

    @property
    def depth(self) -> int:
        """K, the length of the chain."""
        return len(self.counts) - 1

    @property
    def accept_lengths(self) -> Int[np.ndarray, " F"]:
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @property
    def ranks(self) -> Int[np.ndarray, " F"]:
        """The rank of each outcome's bonus token among the guesses at its accept length, from 0."""
        return np.concatenate([np.arange(count, dtype=np.int32) for count in self.counts])


def power_law(depth: int, acceptance: float, exponent: float, ranks: int = 64) -> Float[np.ndarray, "accept rank"]:
    """Return outcome probabilities under the paper's power law, for use without measurements.

    `FanOut.likeliest` of them is a geometric series over accept lengths, as in the paper.

    Args:
        depth: K of the chain.
        acceptance: probability that a drafted token is accepted, the same for all.
        exponent: r of the power law: the bonus token is not among the first F guesses with probability
            (1 + F) ** -r. The paper counts F from one; here F = 0 always misses.

    Raises:
        HydrajaxError: for an acceptance outside (0, 1) or an exponent outside (0, inf).
    """
    if not 0 < acceptance < 1:
        raise HydrajaxError(f"acceptance: got {acceptance}, expected a number between 0 and 1")
    if not exponent > 0:
        raise HydrajaxError(f"exponent: got {exponent}, expected a positive number")
    accepted = acceptance ** np.arange(depth + 1)
    accepted[:-1] *= 1 - acceptance
    missed = (1.0 + np.arange(ranks + 1)) ** -exponent
    return accepted[:, None] * (missed[:-1] - missed[1:])


def _non_increasing(row: Sequence[float]) -> list[float]:
    """Isotonic regression: pool neighbours that rise into their mean."""
    blocks: list[tuple[float, int]] = []
    for value in row:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [value for value, count in blocks for _ in range(count)]
