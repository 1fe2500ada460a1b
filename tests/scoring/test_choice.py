"""The choice of a score for a question set."""

from __future__ import annotations

import pytest

from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError
from scoring.registry import SCORES, choose

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
