"""`experiments/score.py` on the answers of `hydrajax evaluate`: its files and tables. The answers are made up."""

import json
from functools import partial
from pathlib import Path

import pytest

from helpers import commands
from helpers.outputs import write_lines
from helpers.scripts import EXPERIMENTS, module
from hydrajax.bench.questions.contenders import Answerer
from hydrajax.text.answers import Generation
from scoring.exact_match import ExactMatch
from scoring.intervals import ScoreFigures

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
        write_lines(tmp_path / f"{name}.jsonl", records)
    return {name: tmp_path / f"{name}.jsonl" for name in SETS}


@pytest.fixture
def answers(monkeypatch, tokenizer):
    """``answers(plain, drafted)``: set functions from a prompt to the text that the base alone and the draft answer."""

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


@pytest.fixture(scope="module")
def script():
    return module(EXPERIMENTS / "score.py")


@pytest.fixture
def score(script, capsys, tmp_path):
    """``score(*flags, code=0)`` scores the answers: its ``out`` and ``err``."""
    return partial(commands.run, script.main, capsys, tmp_path / "out")


@pytest.fixture
def summary(tmp_path):
    return lambda: json.loads((tmp_path / "out" / "summary.json").read_text())


def doubled(prompt: str) -> str:
    return f" It is {2 * int(prompt.split()[2])}."


def right_up_to_two(prompt: str) -> str:
    return doubled(prompt) if int(prompt.split()[2]) <= 2 else "No."


def test_scores_are_kept_shown_and_not_computed_twice(
    program, arguments, sets, answers, score, summary, tmp_path, monkeypatch
):
    answers(doubled, right_up_to_two)
    arguments += ["--set", sets["sums"], "--rule", "typical"]
    program(*arguments)
    before = summary()
    result = score()
    lines = (tmp_path / "out" / "scores" / "gsm8k" / f"{DRAFTED}.jsonl").read_text().splitlines()
    assert [json.loads(line)["values"]["exact match"] for line in lines] == [1, 1, 0, 0]
    after = summary()
    scores, records = after.pop("scores"), after.pop("hydrajax_results")
    assert [record["kind"] for record in records] == ["categories", "quality"]
    assert after | {"hydrajax_results": records[:1]} == before
    assert scores["name"] == "gsm8k"
    row = scores["results"][DRAFTED]["overall"]["exact match"]
    # Of 4 draws from two right and two wrong, 0 and 4 are right with a chance of 1 in 16 each.
    assert row == {"questions": 4, "mean": 0.5, "low": 0, "high": 1} | {
        "difference": -0.5, "difference_low": -1, "difference_high": 0,
    }  # fmt: skip
    assert scores["results"][PLAIN]["overall"]["exact match"]["mean"] == 1
    assert "exact match" in result.out
    assert "50.0 [0.0, 100.0]" in result.out
    assert "-50.0 [-100.0, 0.0]" in result.out
    assert all(len(line) <= 110 for line in result.out.splitlines())

    calls = []
    monkeypatch.setattr(ExactMatch, "of", lambda *arguments: calls.append(arguments))
    again = score()
    assert calls == []
    assert again.out == result.out
    monkeypatch.setattr(ExactMatch, "identity", lambda self: {"version": 2})
    score()
    assert len(calls) == 6  # two answers are the same


def test_equal_outputs_have_equal_scores(program, arguments, sets, answers, score, summary):
    answers(lambda _: "    return 2 * x\n\nprint(x)", lambda _: "    return 2 * x\n\nprint(x)")
    program(*arguments, "--set", sets["code"])
    result = score("--run-code")
    assert "100.0 [100.0, 100.0]" in result.out
    row = next(line for line in result.out.splitlines() if "0.0 [0.0, 0.0]" in line)
    assert row.split()[0] == "code"
    assert row.split()[-1] == "yes"
    scores = summary()["scores"]
    assert scores["results"][DRAFTED]["overall"]["pass@1"]["mean"] == 1
    assert scores["settings"]["wall_seconds"] == 10


def test_a_judge(program, arguments, sets, answers, score, summary, monkeypatch, tmp_path):
    answers(lambda _: "A poem.", lambda _: "A poem.")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    program(*arguments, "--set", sets["talk"])
    judge = ["--judge", "http://127.0.0.1:9/v1", "--judge-model", "m"]
    result = score(*judge, code=2)
    assert result.err.startswith("hydrajax: --judge: cannot reach http://127.0.0.1:9/v1: ")
    assert result.err.count("\n") == 1
    assert "scores" not in summary()

    ratings = {"first": 8, "second": 6}
    monkeypatch.setenv("HYDRAJAX_JUDGE_KEY", "k-1")
    monkeypatch.setattr(
        "scoring.judge.Judge.ask",
        lambda judge, messages: f"[[{ratings['second' if 'More.' in messages[1]['content'] else 'first']}]]",
    )
    result = score(*judge)
    assert [line.split()[2:4] for line in result.out.splitlines() if "rating" in line][:1] == [["rating", "7.00"]]
    assert "turn 2" in result.out
    assert not [path for path in (tmp_path / "out").rglob("*.json*") if "k-1" in path.read_text()]


def test_mistakes(program, arguments, sets, answers, score, summary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert score(code=2).err.startswith("hydrajax: answers: no such file: ")
    (tmp_path / "changed.jsonl").write_text(sets["talk"].read_text().replace("Write", "Read"))
    answers(lambda _: "1", lambda _: "1")
    program(*arguments, "--set", sets["talk"])
    judge = ["--judge", "http://host/v1", "--judge-model", "m"]
    for flags, message in [
        (["--score", "bleu"], "--score: got 'bleu', expected auto, humaneval, gsm8k, rouge, judge"),
        ([], "--score: no score but a judge's fits these questions"),
        (judge[:2], "--judge-model: is needed for the score judge"),
        ([*judge, "--data", "elsewhere", "--set", "changed.jsonl"], "--set: changed.jsonl has other questions than "),
    ]:
        result = score(*flags, code=2)
        assert result.err.count("\n") == 1
        assert result.err.startswith(f"hydrajax: {message}")
        assert "scores" not in summary()


def test_tables_fit_eighty_columns(script, capsys, monkeypatch):
    """With the longest names and values of the published sets."""
    monkeypatch.setenv("COLUMNS", "80")
    row = ScoreFigures(1319, 0.5, 0.4, 1.0, -0.101, -0.151, 0.101)
    scores = {
        "metrics": ExactMatch.metrics,
        "results": {name: {"math_reasoning": {"exact match": vars(row)}} for name in (PLAIN, DRAFTED)},
    }
    script.show(scores, {name: {"math_reasoning": {"equal": None}} for name in (PLAIN, DRAFTED)}, PLAIN, 1319)
    out = capsys.readouterr().out
    for text in ("math_reasoning", "exact match", "50.0 [40.0, 100.0]", "-10.1 [-15.1, +10.1]"):
        assert text in out
