"""Hits and misses of the speculation cache."""

import numpy as np
from jaxtyping import Float

from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.speculator import MISS


class SpeculationRecord:
    """Hits and misses of one call, from `hydrajax.ssd.speculator.SpeculatorState.record`.

    Attributes:
        numbers: int32 ``[B, rounds]`` for each round that a sequence continued after, the index of the outcome in the
            speculation cache, -1 for a miss; -2 for no such round.
        accept_lengths: int32 ``[B, rounds]``.
    """

    def __init__(self, numbers: np.ndarray, accept_lengths: np.ndarray, fan_out: FanOut):
        self.numbers, self.accept_lengths, self.fan_out = numbers, accept_lengths, fan_out

    @property
    def rounds(self) -> int:
        """Rounds of all sequences."""
        return int((self.numbers >= MISS).sum())

    @property
    def hits(self) -> int:
        return int((self.numbers >= 0).sum())

    @property
    def hit_rate(self) -> float:
        """Hits per round of a sequence; 0 without rounds."""
        return self.hits / max(self.rounds, 1)

    @property
    def ready_rate(self) -> float:
        """The share of the batch's rounds in which no sequence missed, so that no sequence waited for a draft."""
        continued = (self.numbers >= MISS).any(axis=0)
        return float((self.numbers != MISS).all(axis=0)[continued].mean()) if continued.any() else 0.0

    def outcomes(self) -> Float[np.ndarray, "accept rank"]:
        """Count the outcomes by accept length and rank; the last column counts the misses."""
        fan_out = self.fan_out
        found = np.zeros((fan_out.depth + 1, max(fan_out.counts) + 1))
        hits = self.numbers[self.numbers >= 0]
        np.add.at(found, (fan_out.accept_lengths[hits], fan_out.ranks[hits]), 1)
        np.add.at(found, (self.accept_lengths[self.numbers == MISS], -1), 1)
        return found
