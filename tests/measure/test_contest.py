"""Contests of decoders, on a clock that they move themselves: rates, intervals and equality in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from hydrajax.decoding.decode import DecodeResult
from hydrajax.measure import benchmark
from hydrajax.measure.contest import Way, contest

PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 6, 5)]


class Clock:
    """Stands for the module `time`: a decoder that takes 2 s moves it by 2."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    return clock


def decoder(clock, seconds, steps: int, change: int = 0, seen: list | None = None, name: str = ""):
    """Emits 8 tokens per row in ``steps`` steps; ``seconds`` a number, or one for every call after the first two."""
    calls = iter(seconds if isinstance(seconds, list) else [seconds] * 1000)

    def decode(params, prompt, lengths, rng):
        rows = len(prompt)
        if seen is not None:
            seen.append((name, rows, prompt.shape[1], lengths.tolist()))
        clock.now += next(calls)
        tokens = np.arange(rows * 10).reshape(rows, 10) + change
        tokens[:, 8:] = np.random.default_rng().integers(0, 99, (rows, 2))  # beyond the lengths: garbage
        accept_lengths = np.full((rows, steps), 8 // steps - 1)
        return DecodeResult(tokens, np.full(rows, 8), accept_lengths, np.full(rows, steps))

    return decode


def test_rates_are_tokens_over_median_seconds(clock):
    ways = {
        "plain": Way(decoder(clock, 4.0, 8), None),
        "tree": Way(decoder(clock, 1.0, 2), None, nodes=5),
        "chain": Way(decoder(clock, 2.0, 4), None, nodes=3),
    }
    plain, tree, chain = contest(ways, PROMPTS, batch_size=1, repeats=3)
    assert (plain.tokens_per_second, tree.tokens_per_second, chain.tokens_per_second) == (2.0, 8.0, 4.0)
    assert (plain.speedup, tree.speedup, chain.speedup) == (1.0, 4.0, 2.0)
    assert (plain.tokens_per_step, tree.tokens_per_step, chain.tokens_per_step) == (1.0, 4.0, 2.0)
    assert (tree.low, tree.high) == (8.0, 8.0)
    assert (tree.chance_best, chain.chance_best) == (1.0, 0.0)
    assert [way.nodes for way in (plain, tree, chain)] == [1, 5, 3]
    assert all(way.equal for way in (plain, tree, chain))


def test_every_round_takes_every_way_once_on_the_same_batches(clock):
    seen: list = []
    ways = {name: Way(decoder(clock, 1.0, 4, seen=seen, name=name), None) for name in "abc"}
    contest(ways, PROMPTS, batch_size=2, repeats=5)
    shapes = {(rows, width, tuple(lengths)) for _, rows, width, lengths in seen}
    assert shapes == {(2, 6, (4, 6)), (2, 6, (5, 4))}  # one shape; the first prompt fills up the last batch
    per_round = [[name for name, *_ in seen[start : start + 6]] for start in range(6, len(seen), 6)]
    assert len(per_round) == 5
    assert all(sorted(names) == ["a", "a", "b", "b", "c", "c"] for names in per_round)
    assert len({tuple(names) for names in per_round}) > 1  # not always in the same order


def test_the_interval_comes_from_whole_rounds(clock):
    """A machine that is twice as slow in two of five rounds."""
    speeds = [1.0, 1.0, 2.0, 1.0, 2.0]
    ways = {
        "plain": Way(decoder(clock, [0.0, *speeds], 8), None),
        "tree": Way(decoder(clock, [0.0, *(s / 2 for s in speeds)], 8), None),
        "other": Way(decoder(clock, [0.0, *(s / 1.5 for s in speeds)], 8), None),
    }
    plain, tree, other = contest(ways, PROMPTS[:1], batch_size=1, repeats=5)
    assert (plain.tokens_per_second, tree.speedup) == (8.0, 2.0)
    assert (plain.low, plain.high) == pytest.approx((4.0, 8.0))
    assert (tree.chance_best, other.chance_best) == (1.0, 0.0)  # in any choice of rounds


def test_another_output_is_told(clock):
    ways = {"plain": Way(decoder(clock, 1.0, 8), None), "wrong": Way(decoder(clock, 1.0, 8, change=1), None)}
    assert [way.equal for way in contest(ways, PROMPTS, batch_size=3, repeats=1)] == [True, False]
