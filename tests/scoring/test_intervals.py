"""Bootstrap intervals of mean scores and of paired differences."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from helpers.answering import FAST, PLAIN
from hydrajax.bench.questions.sets import Question
from scoring.intervals import ScoreFigures, mean_interval, summarise_scores


def test_the_interval_of_a_share_is_the_binomials():
    """Drawing n questions with replacement from k right ones of n gives a binomial count."""
    values = np.array([1.0] * 30 + [0.0] * 70)
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(0.3)
    assert [low, high] == pytest.approx(binom.ppf([0.025, 0.975], 100, 0.3) / 100, abs=0.011)  # a question more or less


def test_the_interval_of_a_mean_has_the_width_of_the_normal_law():
    values = np.random.default_rng(6).uniform(0, 1, 400)
    mean, low, high = mean_interval(values)
    error = np.std(values) / 20
    assert mean == pytest.approx(values.mean())
    assert [low, high] == pytest.approx([mean - 1.96 * error, mean + 1.96 * error], abs=0.15 * error)
    assert mean_interval(np.array([0.5])) == (0.5, None, None)


def test_differences_are_paired():
    """Hard and easy questions: each figure is wide, their difference is not."""
    questions = [Question(n, "a" if n < 40 else "b", ("x",)) for n in range(80)]
    hard = np.random.default_rng(7).uniform(0, 1, 80)
    values = {
        PLAIN: {n: {"m": hard[n]} for n in range(80)},
        FAST: {n: {"m": hard[n] - 0.1 + 0.01 * (n % 2)} for n in range(80)},
    }
    found = summarise_scores(values, questions, PLAIN, ["m"])
    assert [list(rows) for rows in found.values()] == [["a", "b", "overall"]] * 2
    row = found[FAST]["overall"]["m"]
    assert (row.questions, row.mean) == (80, pytest.approx(hard.mean() - 0.095))
    assert row.difference == pytest.approx(-0.095)
    error = 0.005 / np.sqrt(80)
    assert [row.difference_low, row.difference_high] == pytest.approx(
        [-0.095 - 1.96 * error, -0.095 + 1.96 * error], abs=0.2 * error
    )
    assert row.high - row.low > 20 * (row.difference_high - row.difference_low)
    plain = found[PLAIN]["overall"]["m"]
    assert (plain.difference, plain.difference_low, plain.difference_high) == (0, 0, 0)


def test_only_questions_with_a_figure_from_all_count():
    questions = [Question(n, name, ("x",)) for n, name in enumerate(["a", "a", "b"])]
    values = {PLAIN: {0: {"m": 1.0, "n": 5.0}, 1: {"m": 3.0}}, FAST: {0: {"m": 2.0, "n": 6.0}, 2: {"m": 9.0}}}
    found = summarise_scores(values, questions, PLAIN, ["m", "n", "o"])[FAST]
    assert {name: list(metrics) for name, metrics in found.items()} == {"a": ["m", "n"], "overall": ["m", "n"]}
    assert found["a"]["m"] == ScoreFigures(1, 2.0, None, None, 1.0, None, None)
