"""Compare the closed forms of Leviathan et al. with enumeration of all outcomes and with their printed figures."""

from __future__ import annotations

import itertools

import pytest

from helpers.refusals import assert_refused
from hydrajax.bench.trees.speculation import best_length, expected_tokens, improvement


def test_expected_tokens_by_enumeration():
    """Enumerate all 2^K outcomes of K drafted tokens; the first rejection ends the step."""
    for alpha, k in itertools.product((0.0, 0.3, 0.999, 1.0), (0, 1, 2, 9)):
        total = 0.0
        for accepted in itertools.product([True, False], repeat=k):
            chance = 1.0
            for one in accepted:
                chance *= alpha if one else 1 - alpha
            total += chance * (1 + (accepted.index(False) if False in accepted else k))
        assert expected_tokens(alpha, k) == pytest.approx(total, rel=1e-9)


def test_speedups():
    """Their table 1, with a draft that costs nothing, and one draft pass that costs a tenth of the base's."""
    for alpha, k, speed in ((0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 10, 6.86)):
        assert improvement(alpha, k, 0.0) == pytest.approx(speed, abs=0.005)
    assert improvement(0.5, 3, 0.1) == pytest.approx((1 + 0.5 + 0.25 + 0.125) / 1.3)


def test_best_length_is_optimal():
    for alpha, c in itertools.product((0.0, 0.4, 0.8, 0.95, 1.0), (0.0, 0.02, 0.1, 0.5, 1.2)):
        best = best_length(alpha, c, 12)
        assert all(improvement(alpha, best, c) >= improvement(alpha, k, c) for k in range(13))
        # Corollary 3.9: a chain pays exactly if alpha > c, and then even a chain of one token does.
        assert (best > 0) == (alpha > c)
        assert alpha <= c or improvement(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))


def test_numbers_out_of_range():
    assert_refused(
        improvement,
        (-0.1, 1, 0.1, "acceptance: got -0.1, expected 0 to 1"),
        (1.1, 1, 0.1, "acceptance: got 1.1, expected 0 to 1"),
        (float("nan"), 1, 0.1, "acceptance: got nan, expected 0 to 1"),
        (0.5, -1, 0.1, "K: got -1, expected at least 0"),
        (0.5, 1, -0.1, "cost: got -0.1 for a pass of the draft, expected at least 0"),
    )
