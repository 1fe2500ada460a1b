"""Predict the speed of speculative speculative decoding from times and outcome probabilities. NumPy only.

A round begins when the draft sends its tokens. They reach the base after a transfer, the base verifies them, and the
verification outcome returns after another transfer; meanwhile the draft fills its speculation cache. When both have
finished, the draft looks up the outcome: after a hit it sends the next draft at once, after a miss it drafts first.
`predict` computes the mean round in closed form, `simulate` plays random rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from hydrajax.errors import HydrajaxError
from hydrajax.ssd.fan_out import FanOut, power_law


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a round.

    verify: the base's, with accept and commit. draft: K tokens after a miss. prepare: the speculation cache. transfer:
    one way. take: the lookup of an outcome, without drafting.
    """

    verify: float
    draft: float
    prepare: float = 0.0
    transfer: float = 0.0
    take: float = 0.0

    @property
    def in_turn(self) -> float:
        """Seconds of a round with an empty speculation cache."""
        return self.verify + 2 * self.transfer + self.take + self.draft


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Probabilities of verification outcomes.

    known: ``[K+1, R]`` joint probability of each accept length and of the draft's guess of each rank as the bonus
    token. other: ``[K+1]`` probability of each accept length with another bonus token.

    Raises:
        HydrajaxError: unless they are probabilities that sum to 1.
    """

    known: Float[np.ndarray, "accept rank"]
    other: Float[np.ndarray, " accept"]

    def __post_init__(self):
        total = float(self.known.sum() + self.other.sum())
        if min(self.known.min(initial=0), self.other.min(initial=0)) < -1e-12 or abs(total - 1) > 1e-6:
            raise HydrajaxError(f"outcomes: got a sum of {total:.6g}, expected probabilities that sum to 1")

    @classmethod
    def counted(cls, counts: Float[np.ndarray, "accept rank"]) -> Outcomes:
        """Normalise the counts of `SpeculationRecord.outcomes`, whose last column counts the misses."""
        counts = np.asarray(counts, float)
        if not counts.sum() > 0:
            raise HydrajaxError("outcomes: got no counts, expected at least one round")
        shares = counts / counts.sum()
        return cls(shares[:, :-1], shares[:, -1])

    @classmethod
    def power_law(cls, depth: int, acceptance: float, exponent: float = 1.0, ranks: int = 64) -> Outcomes:
        """Outcomes under `hydrajax.ssd.fan_out.power_law`."""
        known = power_law(depth, acceptance, exponent, ranks)
        lengths = acceptance ** np.arange(depth + 1)
        lengths[:-1] *= 1 - acceptance
        return cls(known, lengths - known.sum(axis=1))

    @property
    def depth(self) -> int:
        return len(self.other) - 1

    @property
    def accept_lengths(self) -> Float[np.ndarray, " accept"]:
        """The probability of each accept length."""
        return self.known.sum(axis=1) + self.other

    @property
    def tokens_per_step(self) -> float:
        return float(self.accept_lengths @ (np.arange(self.depth + 1) + 1))

    def hit_rate(self, fan_out: FanOut) -> float:
        """The probability that the outcome is in the speculation cache."""
        if fan_out.depth != self.depth:
            raise HydrajaxError(f"fan_out: got a chain of {fan_out.depth}, expected {self.depth} as in the outcomes")
        return float(sum(row[:count].sum() for row, count in zip(self.known, fan_out.counts, strict=True)))

    @property
    def exponent(self) -> float:
        """r of the misses' power law (1 + F) ** -r, by least squares of logarithms; inf without misses."""
        missed = 1 - np.cumsum(self.known.sum(axis=0))
        if not len(missed) or missed.min() <= 0:
            return float("inf")
        steps = np.log(np.arange(len(missed)) + 2)
        return float(-(steps @ np.log(missed)) / (steps @ steps))

    def best(self, budget: int) -> FanOut:
        """Return the ``budget`` likeliest outcomes."""
        return FanOut.likeliest(self.known, budget)


@dataclass(frozen=True)
class Speed:
    """The speed of rounds with a fan-out.

    ready: probability that all sequences of the batch hit. seconds: of a round. in_turn: seconds of a round with an
    empty speculation cache. tokens_per_second: of the batch. speedup: over the pair in turn. hidden: share of the
    drafting time that is hidden, below 0 if preparing costs more than it saves.
    """

    fan_out: FanOut
    hit_rate: float
    ready: float
    seconds: float
    in_turn: float
    tokens_per_second: float
    hidden: float

    @property
    def speedup(self) -> float:
        return self.in_turn / self.seconds


def predict(times: Times, outcomes: Outcomes, fan_out: FanOut, batch: int = 1) -> Speed:
    """Compute the mean over many rounds with independent outcomes, for rounds and for sequences."""
    hit_rate = outcomes.hit_rate(fan_out)
    ready = hit_rate**batch
    seconds = max(times.verify + 2 * times.transfer, times.prepare) + times.take + (1 - ready) * times.draft
    return _speed(times, outcomes, fan_out, batch, hit_rate, ready, seconds, outcomes.tokens_per_step)


def simulate(
    times: Times, outcomes: Outcomes, fan_out: FanOut, batch: int = 1, rounds: int = 10_000, seed: int = 0
) -> Speed:
    """Estimate the same from random rounds: tokens are accepted one by one, and each side has a clock."""
    random = np.random.default_rng(seed)
    lengths, depth = outcomes.accept_lengths.tolist(), outcomes.depth
    reaches = np.cumsum(lengths[::-1])[::-1].tolist()  # the chance of each accept length or a longer one
    covered = [float(row[:count].sum()) for row, count in zip(outcomes.known, fan_out.counts, strict=True)]
    clock = base_free = 0.0
    tokens = hits = readies = 0
    for _ in range(rounds):
        sent = clock
        all_hit = True
        for _ in range(batch):
            accepted = 0
            while accepted < depth and random.random() * reaches[accepted] < reaches[accepted + 1]:
                accepted += 1
            tokens += accepted + 1
            hit = random.random() * lengths[accepted] < covered[accepted]
            hits += hit
            all_hit &= hit
        base_free = max(sent + times.transfer, base_free) + times.verify
        draft_free = sent + times.prepare
        clock = max(base_free + times.transfer, draft_free) + times.take
        if not all_hit:
            clock += times.draft
        readies += all_hit
    per_sequence = tokens / (rounds * batch)
    hit_rate = hits / (rounds * batch)
    return _speed(times, outcomes, fan_out, batch, hit_rate, readies / rounds, clock / rounds, per_sequence)


def _speed(times, outcomes, fan_out, batch, hit_rate, ready, seconds, tokens) -> Speed:
    hidden = (times.in_turn - seconds) / times.draft if times.draft else 0.0
    return Speed(fan_out, hit_rate, ready, seconds, times.in_turn, batch * tokens / seconds, hidden)


def best(
    times_of: Callable[[int], Times],
    outcomes: Outcomes,
    budgets: Iterable[int],
    batch: int = 1,
    within: float = 0.0,
) -> Speed:
    """Return the fastest of the fan-outs with ``budgets`` outcomes; ``times_of(total)`` gives the cost of each.

    within: choose the smallest fan-out that takes at most this share longer than the fastest. Budgets are cut to the
    number of known outcomes.
    """
    fan_outs = {fan_out.total: fan_out for fan_out in map(outcomes.best, budgets)}
    speeds = [predict(times_of(total), outcomes, fan_out, batch) for total, fan_out in sorted(fan_outs.items())]
    fastest = min(speed.seconds for speed in speeds)
    return next(speed for speed in speeds if speed.seconds <= fastest * (1 + within))
