"""Scores kept per question: what is scored once, what anew, and what a killed run leaves."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from hydrajax.bench.questions.sets import Question
from scoring.score_files import score_answers
from scoring.score_protocol import Scored

QUESTIONS = [Question(1, "a", ("one?",), {"r": 1}), Question("x/2", "a", ("two?", "more?"), {"r": 2})]


class Length:
    """The number of characters of all answers; None of an answer that holds a question mark. Remembers its calls."""

    metrics: ClassVar[dict[str, float]] = {"length": 1}

    def __init__(self, version=1):
        self.version, self.calls = version, []

    def identity(self):
        return {"version": self.version}

    def of(self, question, texts):
        self.calls.append((question.question_id, tuple(texts)))
        return (
            None if "?" in "".join(texts) else Scored({"length": float(sum(map(len, texts)))}, {"texts": list(texts)})
        )


def answers(**texts) -> dict:
    """By model: a text for the first question, and two for the second."""
    return {
        model_id: {
            question.question_id: {"choices": [{"output_ids": [list(map(ord, text)) for text in own]}]}
            for question, own in zip(QUESTIONS, (row[:1], row[1:]), strict=True)
        }
        for model_id, row in texts.items()
    }


def score(folder, score, given, questions=QUESTIONS):
    return score_answers("length", score, questions, given, folder, lambda ids: "".join(map(chr, ids)))


def test_equal_answers_are_scored_once_and_a_rerun_scores_nothing(tmp_path):
    given = answers(plain=["ab", "c", "de"], fast=["ab", "c", "d"], faster=["ab", "c", "de"])
    first, again = Length(), Length()
    values = score(tmp_path, first, given)
    assert {model_id: [row["length"] for row in own.values()] for model_id, own in values.items()} == {
        "plain": [2.0, 3.0], "fast": [2.0, 2.0], "faster": [2.0, 3.0],
    }  # fmt: skip
    assert first.calls == [(1, ("ab",)), ("x/2", ("c", "de")), ("x/2", ("c", "d"))]
    assert score(tmp_path, again, given) == values
    assert again.calls == []
    lines = [json.loads(line) for line in (tmp_path / "scores" / "length" / "fast.jsonl").read_text().splitlines()]
    assert [(line["question_id"], line["values"], line["detail"]) for line in lines] == [
        (1, {"length": 2.0}, {"texts": ["ab"]}), ("x/2", {"length": 2.0}, {"texts": ["c", "d"]}),
    ]  # fmt: skip


def test_what_a_score_depends_on_makes_it_anew(tmp_path):
    given = answers(plain=["ab", "c", "de"])
    score(tmp_path, Length(), given)
    for scored, questions, calls in (
        (Length(2), QUESTIONS, 2),  # other settings of the score
        (Length(2), [Question(1, "a", ("one?",), {"r": 9}), QUESTIONS[1]], 1),  # another reference
        (Length(2), QUESTIONS, 1),  # and the first again
    ):
        score(tmp_path, scored, given, questions)
        assert len(scored.calls) == calls
    changed = Length(2)
    assert score(tmp_path, changed, answers(plain=["abc", "c", "de"]))["plain"][1] == {"length": 3.0}
    assert changed.calls == [(1, ("abc",))]


def test_an_answer_without_a_figure_is_tried_again(tmp_path):
    given = answers(plain=["ab?", "c", "de"])
    assert score(tmp_path, Length(), given) == {"plain": {"x/2": {"length": 3.0}}}
    again = Length()
    score(tmp_path, again, given)
    assert again.calls == [(1, ("ab?",))]


def test_a_killed_run_keeps_the_whole_lines(tmp_path):
    class Killed(Length):
        def of(self, question, texts):
            if len(self.calls) == 1:
                raise KeyboardInterrupt
            return super().of(question, texts)

    given = answers(plain=["ab", "c", "de"])
    with pytest.raises(KeyboardInterrupt):
        score(tmp_path, Killed(), given)
    path = tmp_path / "scores" / "length" / "plain.jsonl"
    path.write_text(path.read_text() + "[]\n" + '{"question_id": "x/2", "val')
    again = Length()
    values = score(tmp_path, again, given)
    assert values == {"plain": {1: {"length": 2.0}, "x/2": {"length": 3.0}}}
    assert again.calls == [("x/2", ("c", "de"))]
    assert len(list(map(json.loads, path.read_text().splitlines()))) == 2
