"""`FanOut` against all other choices of outcomes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.ssd.fan_out import FanOut, power_law


def test_the_outcomes_of_a_fan_out():
    fan_out = FanOut((2, 0, 1))
    assert (fan_out.total, fan_out.depth) == (3, 2)
    assert fan_out.accept_lengths.tolist() == [0, 0, 2]
    assert fan_out.ranks.tolist() == [0, 1, 0]
    assert FanOut.none(2).total == 0
    assert FanOut.uniform(2, 3) == FanOut((3, 3, 3))
    assert FanOut.from_budget(4).total == 12
    assert FanOut.from_budget(3, 0) == FanOut.none(3)


def test_no_other_fan_out_of_the_same_size_is_likelier():
    def hits(chances, counts):
        return sum(row[:count].sum() for row, count in zip(chances, counts, strict=True))

    for budget in range(8):
        chances = np.sort(np.random.default_rng(budget).random((3, 4)), axis=1)[:, ::-1]
        chances /= 1.5 * chances.sum()
        every = [counts for counts in itertools.product(range(5), repeat=3) if sum(counts) == budget]
        likeliest = FanOut.likeliest(chances, budget).counts
        assert hits(chances, likeliest) == pytest.approx(max(hits(chances, counts) for counts in every))


def test_probabilities_that_rise_with_the_rank_are_averaged():
    assert FanOut.likeliest([[0.1, 0.4, 0.0], [0.2, 0.15, 0.0]], 2) == FanOut((2, 0))
    assert FanOut.likeliest([[0.0, 0.0], [0.0, 1.0]], 4) == FanOut((0, 2))  # no guess for an outcome of probability 0


def test_the_power_law_gives_a_geometric_series():
    """With acceptance α and exponent r the counts decrease by about α ** (1 / (1 + r))."""
    alpha, exponent = 0.5, 1.0
    counts = np.array(FanOut.likeliest(power_law(5, alpha, exponent, ranks=4000), 400).counts[:-1], float)
    ratios = counts[1:] / counts[:-1]
    np.testing.assert_allclose(ratios, alpha ** (1 / (1 + exponent)), atol=0.03)
    chances = power_law(3, 0.7, 1.5, ranks=10**6)
    assert chances.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(chances.sum(axis=1), [0.3, 0.21, 0.147, 0.343], atol=1e-6)


def test_refusals():
    for call, message in [
        (lambda: FanOut((1, -1)), r"fan_out: got \[1, -1\], expected one count from 0 up"),
        (lambda: FanOut(()), r"fan_out: got \[\], expected one count"),
        (lambda: FanOut((1000, 1000)), "at most 1024 in total"),
        (lambda: FanOut.from_budget(3, -1), "fan_out: got -1, expected 0 to 1024"),
        (lambda: power_law(3, 1.0, 1.0), "acceptance: got 1.0, expected a number between 0 and 1"),
        (lambda: power_law(3, 0.5, 0.0), "exponent: got 0.0, expected a positive number"),
    ]:
        with pytest.raises(HydrajaxError, match=message):
            call()
