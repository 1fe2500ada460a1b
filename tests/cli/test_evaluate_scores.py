"""`hydrajax evaluate` with scores: what is in its files and tables. The answers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hydrajax.cli import scores as cli_scores
from hydrajax.questions.contenders import Answerer
from hydrajax.questions.scores.exact_match import ExactMatch
from hydrajax.questions.summary import Figures, ScoreFigures
from hydrajax.text.answers import Generation

CODE = 'def double(x):\n    """Twice x."""\n'
CHECK = "def check(candidate):\n    assert candidate(4) == 8\n"
SETS = {
    "sums": [{"question": f"What is {n} + {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(1, 5)],
    "code": [{"task_id": f"T/{n}", "prompt": CODE, "test": CHECK, "entry_point": "double"} for n in range(2)],
    "talk": [{"question_id": 1, "turns": ["Write.", "More."]}],
}


@pytest.fixture
def sets(tmp_path) -> dict[str, Path]:
    for name, records in SETS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {name: tmp_path / f"{name}.jsonl" for name in SETS}


@pytest.fixture
def says(monkeypatch, tokenizer):
    """``says(plain, drafted)``: what the contenders answer to a prompt."""

    def script(plain, drafted):

        def decode(way, ids, seed):
            text = (plain if way.model_id.endswith("autoregressive") else drafted)(tokenizer.decode(ids))
            output = tokenizer.encode(text)
            steps = len(output)
            return Generation(ids, output, text, steps, [1] * steps, steps, 0.01, "length")

        monkeypatch.setattr(Answerer, "decode", decode)

    return script


@pytest.fixture
def arguments(base, tmp_path):
    common = ["evaluate", "--base", base, "--draft", "lookup", "--tree", "chain-2", "--template", "raw"]
    return [*common, "--max-new-tokens", 16, "--output", tmp_path / "out"]


PLAIN, DRAFTED = "tiny-autoregressive", "tiny-lookup-chain-2"


def doubled(prompt: str) -> str:
    return f" It is {2 * int(prompt.split()[2])}."


def right_up_to_two(prompt: str) -> str:
    return doubled(prompt) if int(prompt.split()[2]) <= 2 else "No."


def test_scores_are_kept_shown_and_not_taken_twice(program, arguments, sets, says, tmp_path, monkeypatch):
    says(doubled, right_up_to_two)
    arguments += ["--set", sets["sums"], "--rule", "typical"]
    result = program(*arguments)
    assert not result.code, result.err
    lines = (tmp_path / "out" / "scores" / "gsm8k" / f"{DRAFTED}.jsonl").read_text().splitlines()
    assert [json.loads(line)["values"]["exact match"] for line in lines] == [1, 1, 0, 0]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["scores"]["name"] == "gsm8k"
    row = summary["scores"]["results"][DRAFTED]["overall"]["exact match"]
    # Of 4 draws from two right and two wrong, 0 and 4 are right with a chance of 1 in 16 each.
    assert row == {"questions": 4, "mean": 0.5, "low": 0, "high": 1} | {
        "difference": -0.5, "difference_low": -1, "difference_high": 0,
    }  # fmt: skip
    assert summary["scores"]["results"][PLAIN]["overall"]["exact match"]["mean"] == 1
    assert "exact match" in result.out
    assert "50.0 [0.0, 100.0]" in result.out
    assert "-50.0 [-100.0, 0.0]" in result.out
    assert all(len(line) <= 110 for line in result.out.splitlines())

    calls = []
    monkeypatch.setattr(ExactMatch, "of", lambda *arguments: calls.append(arguments))
    again = program(*arguments)
    assert calls == []
    assert again.out == result.out
    monkeypatch.setattr(ExactMatch, "identity", lambda self: {"version": 2})
    program(*arguments)
    assert len(calls) == 6  # two answers are the same


def test_equal_outputs_have_equal_scores(program, arguments, sets, says, tmp_path):
    says(lambda _: "    return 2 * x\n\nprint(x)", lambda _: "    return 2 * x\n\nprint(x)")
    result = program(*arguments, "--set", sets["code"], "--run-code")
    assert not result.code, result.err
    assert "100.0 [100.0, 100.0]" in result.out
    row = next(line for line in result.out.splitlines() if "0.0 [0.0, 0.0]" in line)
    assert row.split()[0] == "code"
    assert row.split()[-1] == "yes"
    scores = json.loads((tmp_path / "out" / "summary.json").read_text())["scores"]
    assert scores["results"][DRAFTED]["overall"]["pass@1"]["mean"] == 1
    assert scores["settings"]["wall_seconds"] == 10


def test_code_is_not_run_unasked(program, arguments, sets, says, tmp_path):
    says(lambda _: "    return 2 * x\n", lambda _: "    return 2 * x\n")
    result = program(*arguments, "--set", sets["code"])
    assert not result.code, result.err
    assert "not scored: --run-code: is needed for pass@1, which runs what the model wrote, in a sandbox\n" in result.out
    assert "scores" not in json.loads((tmp_path / "out" / "summary.json").read_text())
    assert not (tmp_path / "out" / "scores").exists()


def test_a_judge_that_is_not_there_leaves_the_answers(program, arguments, sets, says, monkeypatch, tmp_path):
    says(lambda _: "A poem.", lambda _: "A poem.")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    arguments += ["--set", sets["talk"], "--judge", "http://127.0.0.1:9/v1", "--judge-model", "m"]
    result = program(*arguments)
    assert result.code == 2
    assert result.err.startswith("hydrajax: --judge: cannot reach http://127.0.0.1:9/v1: ")
    assert result.err.count("\n") == 1
    assert len((tmp_path / "out" / f"{PLAIN}.jsonl").read_text().splitlines()) == 1

    said = {"first": 8, "second": 6}
    monkeypatch.setenv("HYDRAJAX_JUDGE_KEY", "k-1")
    monkeypatch.setattr(
        "hydrajax.questions.scores.judge.Judge.ask",
        lambda judge, messages: f"[[{said['second' if 'More.' in messages[1]['content'] else 'first']}]]",
    )
    result = program(*arguments)
    assert not result.code, result.err
    assert [line.split()[2:4] for line in result.out.splitlines() if "rating" in line][:1] == [["rating", "7.00"]]
    assert "turn 2" in result.out
    assert not [path for path in (tmp_path / "out").rglob("*.json*") if "k-1" in path.read_text()]


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("code", ["--score", "humaneval"], "--run-code: is needed for pass@1"),
        ("talk", ["--score", "gsm8k"], "--score: gsm8k needs an answer that ends in '#### NUMBER', which question 1"),
        ("talk", ["--score", "bleu"], "--score: found 'bleu', allowed are auto, none, humaneval, gsm8k, rouge, judge"),
        ("talk", ["--score", "judge"], "--judge: is needed for the score judge"),
        ("talk", ["--judge", "http://host/v1"], "--judge-model: is needed for the score judge"),
        ("sums", ["--judge", "http://host/v1"], "--judge: has no meaning with the score gsm8k"),
    ],
)
def test_mistakes(program, arguments, sets, name, flags, message, tmp_path):
    result = program(*arguments, "--set", sets[name], *flags)
    assert result.code == 2
    assert result.err.startswith(f"hydrajax: {message}")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_tables_hold_in_eighty_columns(capsys, monkeypatch):
    """With the longest names and figures of the published sets."""
    monkeypatch.setenv("COLUMNS", "80")
    row = ScoreFigures(1319, 0.5, 0.4, 1.0, -0.101, -0.151, 0.101)
    figures = Figures(1319, 10, 10, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0, None)
    choice = SimpleNamespace(note="", score=ExactMatch(), name="gsm8k")
    results = {name: {"math_reasoning": {"exact match": vars(row)}} for name in (PLAIN, DRAFTED)}
    rows = {name: {"math_reasoning": figures} for name in (PLAIN, DRAFTED)}
    cli_scores.show_scores(choice, {"results": results}, rows, PLAIN, 1319)
    out = capsys.readouterr().out
    for text in ("math_reasoning", "exact match", "50.0 [40.0, 100.0]", "-10.1 [-15.1, +10.1]"):
        assert text in out
