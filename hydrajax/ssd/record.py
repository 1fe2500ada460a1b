"""What became of the drafts that were prepared ahead."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from hydrajax.ssd.draft_side import MISS
from hydrajax.ssd.fan_out import FanOut


class Record:
    """Hits and misses of one call, read from `hydrajax.ssd.draft_side.Carry.record`.

    numbers: int32 ``[B, rounds]``, for every round after which a row went on the number of the prepared outcome that
    came about, -1 where none did, -2 where the row took no such round. accept_lengths: int32 ``[B, rounds]`` of these
    rounds. fan_out: what was prepared.
    """

    def __init__(self, numbers: np.ndarray, accept_lengths: np.ndarray, fan_out: FanOut):
        self.numbers, self.accept_lengths, self.fan_out = numbers, accept_lengths, fan_out

    @property
    def rounds(self) -> int:
        """Over all rows."""
        return int((self.numbers >= MISS).sum())

    @property
    def hits(self) -> int:
        return int((self.numbers >= 0).sum())

    @property
    def hit_rate(self) -> float:
        """The share of the rounds after which the row's next draft was ready; 0 if there were none."""
        return self.hits / max(self.rounds, 1)

    @property
    def ready_rate(self) -> float:
        """The share of the rounds of the whole batch after which nobody had to wait: no row that goes on missed."""
        went_on = (self.numbers >= MISS).any(axis=0)
        return float((self.numbers != MISS).all(axis=0)[went_on].mean()) if went_on.any() else 0.0

    def outcomes(self) -> Float[np.ndarray, "accept rank"]:
        """How often each prepared outcome came about, by accept length and rank, in the last column any other."""
        fan_out = self.fan_out
        found = np.zeros((fan_out.depth + 1, max(fan_out.counts) + 1))
        known = self.numbers[self.numbers >= 0]
        np.add.at(found, (fan_out.accept_lengths[known], fan_out.ranks[known]), 1)
        np.add.at(found, (self.accept_lengths[self.numbers == MISS], -1), 1)
        return found
