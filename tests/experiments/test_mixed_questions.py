"""Questions of Spec-Bench, edits of code and conversations in one file."""

from __future__ import annotations

import json
import sys
from collections import Counter

import mixed_questions as script
import pytest

from hydrajax.bench.questions.sets import read_questions


@pytest.fixture
def run(monkeypatch, tmp_path):
    """``run(*argv)``: the exit code of the script on a directory of two small question files."""
    categories = ("writing", "qa")
    questions = [{"question_id": at, "category": categories[at % 2], "turns": [f"Question {at}"]} for at in range(8)]
    (tmp_path / "spec_bench_question.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    lines = [
        {"task": task, "id": at, "history": [{"user": f"{task} {turn}", "bot": "."} for turn in range(turns)]}
        for at, (task, turns) in enumerate((("GR", 2), ("GR", 4), ("IC", 3)))
    ]
    (tmp_path / script.CONVERSATIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def call(*argv: str) -> int:
        monkeypatch.setattr(sys, "argv", ["mixed_questions.py", *argv])
        return script.main()

    return call


def test_categories_take_turns(run, tmp_path):
    output = tmp_path / "mixed.jsonl"
    assert run("--data", str(tmp_path), "--output", str(output), "--turns", "1", "--each", "2") == 0
    questions = read_questions(str(output))
    expected = {"writing": 1, "qa": 2, "edits of code": 2, "conversations": 2}
    assert Counter(one.category for one in questions) == expected
    assert [one.category for one in questions[:4]] == [*expected]
    edits = [one.turns[0] for one in questions if one.category == "edits of code"]
    for edit in edits:
        compile(edit.split("```python\n")[1].removesuffix("\n```"), "edit", "exec")  # a whole function
    conversations = [one.turns for one in questions if one.category == "conversations"]
    assert conversations == [("GR 0", "GR 1", "GR 2"), ("IC 0", "IC 1", "IC 2")]


def test_a_conversation_without_turns_is_named(run, tmp_path, capsys):
    (tmp_path / script.CONVERSATIONS).write_text('{"task": "GR", "history": 3}\n')
    assert run("--data", str(tmp_path), "--output", str(tmp_path / "mixed.jsonl")) == 2
    assert "mtbench101_multiturn.jsonl line 1: history" in capsys.readouterr().err
    assert not (tmp_path / "mixed.jsonl").exists()
