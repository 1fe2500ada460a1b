"""Which outcomes of a verification to prepare for. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from hydrajax.errors import HydrajaxError

MOST_OUTCOMES = 1024  # each is a token in every pass that prepares; more take longer than any base
DEFAULT_BUDGET = 12


@dataclass(frozen=True)
class FanOut:
    """For every accept length 0 .. K of a chain, how many next roots are guessed there.

    An outcome is an accept length and the root that the base chooses to follow. The guesses are the draft's own, in
    their order: after a token that was followed by a rejected one its best tokens but that one, after the whole chain
    simply its best. All zeros prepare nothing: base and draft then work in turn.

    Raises `HydrajaxError` for counts that are negative or more than `MOST_OUTCOMES` together.
    """

    counts: tuple[int, ...]

    def __post_init__(self):
        if not self.counts or min(self.counts) < 0 or self.total > MOST_OUTCOMES:
            raise HydrajaxError(
                f"fan_out: must be counts from 0 up, one for each accept length, at most {MOST_OUTCOMES} together, "
                f"found {list(self.counts)}"
            )

    @property
    def total(self) -> int:
        """F, how many outcomes are prepared."""
        return sum(self.counts)

    @property
    def depth(self) -> int:
        """K of the chain that it is for."""
        return len(self.counts) - 1

    @property
    def accept_lengths(self) -> Int[np.ndarray, " F"]:
        """Of each prepared outcome."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @property
    def ranks(self) -> Int[np.ndarray, " F"]:
        """Of each prepared outcome's root, 0 for the best guess at its accept length."""
        return np.concatenate([np.arange(count, dtype=np.int32) for count in self.counts])


def nothing(depth: int) -> FanOut:
    """Base and draft in turn."""
    return FanOut((0,) * (depth + 1))


def even(depth: int, each: int) -> FanOut:
    """The same number of guesses at every accept length."""
    return FanOut((each,) * (depth + 1))


def likeliest(probabilities: Float[np.ndarray, "accept rank"] | Sequence[Sequence[float]], budget: int) -> FanOut:
    """The ``budget`` likeliest outcomes, which no other choice of as many can beat in hits.

    probabilities: of accept length a and the guess of rank j together. Later ranks must not be likelier than earlier
    ones; where measured figures say so, by chance, they are taken as equal to the mean of the two.
    """
    found = np.array([_falling(row) for row in probabilities])
    order = np.argsort(-found, axis=None, kind="stable")[: max(budget, 0)]
    order = order[found.reshape(-1)[order] > 0]
    counts = np.bincount(order // found.shape[1], minlength=found.shape[0])
    return FanOut(tuple(int(count) for count in counts))


def _falling(row: Sequence[float]) -> list[float]:
    """The nearest row that never rises: neighbours that do are replaced by their mean."""
    blocks: list[tuple[float, int]] = []
    for value in row:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [value for value, count in blocks for _ in range(count)]


def supposed(depth: int, acceptance: float, exponent: float, ranks: int = 64) -> Float[np.ndarray, "accept rank"]:
    """Probabilities of outcomes where nothing was measured: `likeliest` of them falls as a geometric series.

    acceptance: chance that a drafted token is accepted, the same for all. exponent: r of a power law, such
    as the paper finds: the next root is not among the first F guesses with chance (1 + F) ** -r. (Its F counts from
    one; here no guess at all always misses.)

    Raises `HydrajaxError` for numbers outside (0, 1) and (0, inf).
    """
    if not 0 < acceptance < 1:
        raise HydrajaxError(f"acceptance: must be above 0 and below 1, found {acceptance}")
    if not exponent > 0:
        raise HydrajaxError(f"exponent: must be positive, found {exponent}")
    accepted = acceptance ** np.arange(depth + 1)
    accepted[:-1] *= 1 - acceptance
    missed = (1.0 + np.arange(ranks + 1)) ** -exponent
    return accepted[:, None] * (missed[:-1] - missed[1:])


def of_budget(depth: int, budget: int) -> FanOut:
    """So many outcomes, for a draft that is right two times in three and roots as `supposed` has them with r = 1."""
    if not 0 <= budget <= MOST_OUTCOMES:
        raise HydrajaxError(f"fan_out: must be from 0 to {MOST_OUTCOMES}, found {budget}")
    return likeliest(supposed(depth, 2 / 3, 1.0, ranks=max(budget, 1)), budget)


def default(depth: int) -> FanOut:
    """Where nobody says otherwise."""
    return of_budget(depth, DEFAULT_BUDGET)
