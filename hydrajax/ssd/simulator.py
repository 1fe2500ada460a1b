"""How fast base and draft are on devices of their own, from times and chances. NumPy only.

A round begins when the draft sends its tokens. They reach the base after a transfer, the base verifies them, its
verdict comes back after another; meanwhile the draft prepares. When both are there, the draft takes the verdict: if it
had prepared for it, that is all, and if not it drafts now. Then it sends again. `predict` says what that comes to on
the mean, `simulate` plays it with dice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from hydrajax.errors import HydrajaxError
from hydrajax.ssd.fan_out import FanOut, likeliest, supposed


@dataclass(frozen=True)
class Times:
    """Seconds. verify: of a round, with accept and commit. draft: K tokens, in turn. prepare: for all outcomes of a
    fan-out. transfer: from one side to the other, one way. take: a verdict taken in, without drafting.
    """

    verify: float
    draft: float
    prepare: float = 0.0
    transfer: float = 0.0
    take: float = 0.0

    @property
    def in_turn(self) -> float:
        """A round of the same pair where nothing is prepared."""
        return self.verify + 2 * self.transfer + self.take + self.draft


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The chances of a verification's outcomes.

    known: ``[K+1, R]``, of accept length a and the draft's guess of rank j as the next root, together. other:
    ``[K+1]``, of accept length a and a root beyond these guesses.

    Raises `HydrajaxError` unless they are probabilities that sum to 1.
    """

    known: Float[np.ndarray, "accept rank"]
    other: Float[np.ndarray, " accept"]

    def __post_init__(self):
        total = float(self.known.sum() + self.other.sum())
        if min(self.known.min(initial=0), self.other.min(initial=0)) < -1e-12 or abs(total - 1) > 1e-6:
            raise HydrajaxError(f"outcomes: must be probabilities that sum to 1, found {total:.6g}")

    @classmethod
    def counted(cls, counts: Float[np.ndarray, "accept rank"]) -> Outcomes:
        """From `hydrajax.ssd.record.Record.outcomes`, whose last column holds all other roots."""
        counts = np.asarray(counts, float)
        if not counts.sum() > 0:
            raise HydrajaxError("outcomes: none were counted")
        shares = counts / counts.sum()
        return cls(shares[:, :-1], shares[:, -1])

    @classmethod
    def supposed(cls, depth: int, acceptance: float, exponent: float = 1.0, ranks: int = 64) -> Outcomes:
        """`hydrajax.ssd.fan_out.supposed`, and what is left."""
        known = supposed(depth, acceptance, exponent, ranks)
        lengths = acceptance ** np.arange(depth + 1)
        lengths[:-1] *= 1 - acceptance
        return cls(known, lengths - known.sum(axis=1))

    @property
    def depth(self) -> int:
        return len(self.other) - 1

    @property
    def accept_lengths(self) -> Float[np.ndarray, " accept"]:
        """The chance of each."""
        return self.known.sum(axis=1) + self.other

    @property
    def tokens_per_step(self) -> float:
        return float(self.accept_lengths @ (np.arange(self.depth + 1) + 1))

    def hit_rate(self, fan_out: FanOut) -> float:
        """The chance that the outcome is one of those that are prepared for."""
        if fan_out.depth != self.depth:
            raise HydrajaxError(f"fan_out: is for a chain of {fan_out.depth}, the outcomes are of {self.depth}")
        return float(sum(row[:count].sum() for row, count in zip(self.known, fan_out.counts, strict=True)))

    @property
    def exponent(self) -> float:
        """r of the power law (1 + F) ** -r that misses follow over fan-outs, `hydrajax.ssd.fan_out.supposed`: the least
        squares of logarithms. Infinite where nothing is ever missed."""
        missed = 1 - np.cumsum(self.known.sum(axis=0))
        if not len(missed) or missed.min() <= 0:
            return float("inf")
        steps = np.log(np.arange(len(missed)) + 2)
        return float(-(steps @ np.log(missed)) / (steps @ steps))

    def best(self, budget: int) -> FanOut:
        """The likeliest outcomes, so many of them."""
        return likeliest(self.known, budget)


@dataclass(frozen=True)
class Speed:
    """Of rounds with this fan-out, for a batch whose rows all must hit for nobody to wait.

    ready: the chance of that. seconds: of a round. in_turn: of a round where nothing is prepared. tokens_per_second:
    over all rows. speedup: against the same pair in turn. hidden: which share of the drafting is no longer waited for,
    below 0 where preparing takes longer than what it saves.
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
    """The mean over many rounds, whose outcomes do not depend on each other; rows neither."""
    hit_rate = outcomes.hit_rate(fan_out)
    ready = hit_rate**batch
    seconds = max(times.verify + 2 * times.transfer, times.prepare) + times.take + (1 - ready) * times.draft
    return _speed(times, outcomes, fan_out, batch, hit_rate, ready, seconds, outcomes.tokens_per_step)


def simulate(
    times: Times, outcomes: Outcomes, fan_out: FanOut, batch: int = 1, rounds: int = 10_000, seed: int = 0
) -> Speed:
    """The same from so many rounds that are played: tokens are accepted one by one or not, each side has a clock."""
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
    per_row = tokens / (rounds * batch)
    hit_rate = hits / (rounds * batch)
    return _speed(times, outcomes, fan_out, batch, hit_rate, readies / rounds, clock / rounds, per_row)


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
    """The fastest of the fan-outs of so many outcomes each; ``times_of(outcomes)`` is its cost.

    within: the smallest is taken that needs at most this share of time more. A budget that the known outcomes cannot
    fill is cut to them.
    """
    fan_outs = {fan_out.total: fan_out for fan_out in map(outcomes.best, budgets)}
    speeds = [predict(times_of(total), outcomes, fan_out, batch) for total, fan_out in sorted(fan_outs.items())]
    fastest = min(speed.seconds for speed in speeds)
    return next(speed for speed in speeds if speed.seconds <= fastest * (1 + within))
