"""ROUGE by the package against F1 from counts by hand, and what is said where the package is missing."""

from __future__ import annotations

import sys

import pytest

from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError
from scoring.rouge import Rouge


def test_f1_of_counts_by_hand():
    """No stem differs from its word. 4 of 6 and of 5 words, 2 of 5 and of 4 pairs, 3 in order: F1 of the two shares."""
    pytest.importorskip("rouge_score")
    question = Question(1, "a", ("b",), {"article": "x", "highlights": "the cat sat on the mat"})
    found = Rouge().of(question, ["On the mat the dog!"]).values
    assert found["ROUGE-1"] == pytest.approx(2 * (4 / 6) * (4 / 5) / (4 / 6 + 4 / 5))  # the, the, on, mat
    assert found["ROUGE-2"] == pytest.approx(2 * (2 / 5) * (2 / 4) / (2 / 5 + 2 / 4))  # on the, the mat
    assert found["ROUGE-L"] == pytest.approx(2 * (3 / 6) * (3 / 5) / (3 / 6 + 3 / 5))  # on the mat
    assert Rouge().of(question, [""]).values == dict.fromkeys(Rouge.metrics, 0.0)
    assert Rouge().of(question, ["The cats sat on the mats."]).values == dict.fromkeys(Rouge.metrics, 1.0)  # stems


def test_references():
    for record, lacking in [
        ({"highlights": "a"}, None),
        ({"summary": "a"}, None),
        ({"highlights": " ", "summary": "a"}, None),
        ({"summary": ["a"]}, "one of highlights, summary"),
        ({}, "one of highlights, summary"),
    ]:
        assert Rouge.lacks(Question(1, "a", ("b",), record)) == lacking


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(HydrajaxError, match=r"^score: ROUGE needs rouge-score: pip install rouge-score$"):
        Rouge()
