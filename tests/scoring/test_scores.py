"""Scores: their choice for a question set, exact match, ROUGE, pass@1 of HumanEval, their files and intervals."""

import json
import os
import sys
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from scipy.stats import binom

from helpers.answering import FAST, PLAIN
from hydrajax.bench.questions.sets import FILES, Question, read_questions
from hydrajax.errors import HydrajaxError
from scoring.exact_match import ExactMatch, last_number
from scoring.intervals import ScoreFigures, mean_interval, summarise_scores
from scoring.pass_at_1 import PassAt1, program
from scoring.registry import SCORES, choose
from scoring.rouge import Rouge
from scoring.score_files import score_answers
from scoring.score_protocol import Scored

CODE = Question("H/0", "code", ("def f():",), {"prompt": "def f():", "test": "def check(f): f()", "entry_point": "f"})
SUM = Question(1, "gsm8k", ("1 + 1?",), {"answer": "#### 2"})
ARTICLE = Question(1, "cnn", ("Summarise",), {"article": "x", "highlights": "y"})
TALK = Question(81, "writing", ("Write.", "More."))
JUDGE = {"judge": "http://host/v1", "judge_model": "m"}


def test_auto():
    for name, question, more in (
        ("humaneval", CODE, {"run_code": True}),
        ("gsm8k", SUM, {"run_code": True}),
        ("judge", TALK, JUDGE),
    ):
        found, score = choose("auto", [question], **more)
        assert (found, type(score)) == (name, SCORES[name])
    pytest.importorskip("rouge_score")
    assert choose("auto", [ARTICLE])[0] == "rouge"


REFUSED = [
    ("bleu", [SUM], {}, "score: got 'bleu', expected auto, humaneval, gsm8k, rouge, judge"),
    ("gsm8k", [SUM, TALK], {}, "score: gsm8k needs an answer that ends in '#### NUMBER'; question 81 has none"),
    ("humaneval", [TALK], {"run_code": True}, "score: humaneval needs prompt, test, entry_point; question 81 has none"),
    ("rouge", [SUM], {}, "score: rouge needs one of highlights, summary; question 1 has none"),
    ("judge", [TALK], {}, "judge: is needed for the score judge"),
    ("auto", [TALK], {"judge": "http://host"}, "judge_model: is needed for the score judge"),
    ("auto", [TALK], {"judge": "host", "judge_model": "m"}, "judge: got 'host', expected an http or https address"),
    ("auto", [SUM], JUDGE, "judge: the score gsm8k asks no judge; add --score judge"),
    ("auto", [SUM, TALK], {}, "score: no score but a judge's fits these questions"),
    ("auto", [CODE], {}, "run_code: pass@1 runs the generated code in a sandbox"),
]


def test_refused():
    for name, questions, more, message in REFUSED:
        with pytest.raises(HydrajaxError) as caught:
            choose(name, questions, **more)
        assert str(caught.value).startswith(message)


def test_last_number():
    for text, number in {
        "The answer is 42.": "42", "She pays $1,234.50 in all.": "1234.5", "1,000,000": "1000000",
        "first 3, then 7 apples": "7", "it falls to -5 degrees": "-5", "he owes -$12": "-12", "$-12": "-12",
        "pages 3-5": "5", "(4)-2": "2", "one of 1,2,3": "3", "1234,567": "567", "a share of .5": "0.5", "72%": "72",
        "**18**": "18", "<<48/2=24>>24 clips": "24", "007": "7",
    }.items():  # fmt: skip
        assert last_number(text) == Decimal(number), text
    assert last_number("none") is None


def test_exact_match():
    for reference, answer, value in [
        ("2 + 2 = 4\n#### 4", "So 4.00.", 1.0),
        ("#### 1,450", "It is $1450", 1.0),
        ("#### 1,450", "It is $1,45", 0.0),
        ("#### -3", "3", 0.0),
        ("12 of them\n#### 5", "I cannot say", 0.0),
    ]:
        question = Question(1, "gsm8k", ("How many?",), {"question": "How many?", "answer": reference})
        assert ExactMatch.lacks(question) is None
        assert ExactMatch().of(question, [answer]).values == {"exact match": value}


def test_what_has_no_reference():
    for answer in [None, "42", "#### none", ["#### 42"]]:
        assert ExactMatch.lacks(Question(1, "a", ("b",), {"answer": answer})) == "an answer that ends in '#### NUMBER'"


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


PROMPT = 'import math\n\ndef double(x):\n    """Twice x."""\n'
RECORD = {"prompt": PROMPT, "entry_point": "double", "test": "def check(candidate):\n    assert candidate(4) == 8\n"}
QUESTION = Question("T/1", "code", (PROMPT,), RECORD)


def test_a_completion_ends_at_the_first_stop_sequence():
    for text, kept in {
        "    return 2 * x\n": "    return 2 * x\n",
        "    return 2 * x\n\ndef more():\n    pass": "    return 2 * x\n",
        "    a = 2\n    # inner\n    return a * x\n# outer": "    a = 2\n    # inner\n    return a * x",
        "    return 2\nprint(double(1))\nclass A:": "    return 2",
        "    return 2\nif __name__:\n    pass": "    return 2",
        "    return 2\nclass A:\n    pass": "    return 2",
        "\ndef double": "",
    }.items():
        assert program(PROMPT, text, "double") == PROMPT + kept


def test_a_fenced_function_replaces_the_prompts():
    chat = "Sure:\n```python\ndef helper(x):\n    return x\n\ndef double(x):\n    return helper(x) * 2\n```\nDone."
    found = program(PROMPT, chat, "double")
    assert found.startswith(PROMPT.rstrip())
    assert found.endswith("    return helper(x) * 2\n")
    assert PassAt1().of(QUESTION, [chat]).values == {"pass@1": 1.0}
    assert program(PROMPT, "```\ndef other(x): pass\n```", "double").startswith(PROMPT + "```")


def test_pass_at_1():
    for text, value, outcome in [
        ("    return math.floor(2 * x)\n", 1.0, "passed"),
        ("    return x\n\ndef double(x):\n    return 2 * x\n", 0.0, "AssertionError"),
        ("return 2 * x", 0.0, "SyntaxError"),
        ("    import sys\n    sys.exit(0)\n", 0.0, "SystemExit"),
    ]:
        scored = PassAt1().of(QUESTION, [text])
        assert (scored.values, scored.detail) == ({"pass@1": value}, {"outcome": outcome})


def test_what_is_lacking_is_named():
    assert PassAt1.lacks(QUESTION) is None
    assert PassAt1.lacks(Question(1, "a", ("b",), {"prompt": "b", "test": 3})) == "test, entry_point"


@pytest.mark.slow
def test_all_canonical_solutions_pass():
    project = Path(__file__).resolve().parents[3]
    data = Path(os.environ.get("HYDRAJAX_PROMPTS") or project.parent / "shared" / "prompts")
    if not (data / FILES["humaneval"]).is_file():
        pytest.skip(f"no question files in {data}; set HYDRAJAX_PROMPTS")
    questions = read_questions("humaneval", data)
    outcomes = {q.question_id: PassAt1().of(q, [q.record["canonical_solution"]]).detail["outcome"] for q in questions}
    assert len(outcomes) == 164
    assert {key: outcome for key, outcome in outcomes.items() if outcome != "passed"} == {}
    # And so does each as a chat model would give it; an empty function passes nowhere.
    for question in questions[::20]:
        whole = question.record["prompt"] + question.record["canonical_solution"]
        assert PassAt1().of(question, [f"Here:\n```python\n{whole}\n```"]).values == {"pass@1": 1.0}
        assert PassAt1().of(question, ["    return None\n"]).values == {"pass@1": 0.0}


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
