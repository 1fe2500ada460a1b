"""Completions of HumanEval: where they end, what is run, and that the canonical solutions pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydrajax.bench.questions.sets import FILES, Question, read_questions
from scoring.pass_at_1 import PassAt1, program

PROMPT = 'import math\n\ndef double(x):\n    """Twice x."""\n'
RECORD = {"prompt": PROMPT, "entry_point": "double", "test": "def check(candidate):\n    assert candidate(4) == 8\n"}
QUESTION = Question("T/1", "code", (PROMPT,), RECORD)


def test_a_completion_ends_at_the_first_stop_sequence():
    for text, kept in [
        ("    return 2 * x\n", "    return 2 * x\n"),
        ("    return 2 * x\n\ndef more():\n    pass", "    return 2 * x\n"),
        ("    a = 2\n    # inner\n    return a * x\n# outer", "    a = 2\n    # inner\n    return a * x"),
        ("    return 2\nprint(double(1))\nclass A:", "    return 2"),
        ("    return 2\nif __name__:\n    pass", "    return 2"),
        ("    return 2\nclass A:\n    pass", "    return 2"),
        ("\ndef double", ""),
    ]:
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
