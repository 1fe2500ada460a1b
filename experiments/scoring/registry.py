"""Scores by name, and the choice of one for a question set."""

from __future__ import annotations

from collections.abc import Sequence

from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.text.jsonl import shown
from scoring.exact_match import ExactMatch
from scoring.judge import Judge
from scoring.pass_at_1 import PassAt1
from scoring.rouge import Rouge
from scoring.score_protocol import Score

AUTO, JUDGE, CODE = "auto", "judge", "humaneval"
SCORES: dict[str, type[Score]] = {CODE: PassAt1, "gsm8k": ExactMatch, "rouge": Rouge, JUDGE: Judge}


def choose(
    name: str,
    questions: Sequence[Question],
    *,
    run_code: bool = False,
    judge: str | None = None,
    judge_model: str | None = None,
) -> tuple[str, Score]:
    """Return the name of a score and the score.

    Args:
        name: a key of `SCORES`; `AUTO` takes the first that every question has the fields for, and a judge only if
            ``judge`` is given.
        questions: the questions to score.
        run_code: permit running generated code.
        judge, judge_model: address and name of a judge.

    Raises:
        HydrajaxError: if the score lacks a field of a question, a permission or a package, and for a judge that the
            score does not use.
    """
    if name not in (AUTO, *SCORES):
        raise not_allowed("score", name, (AUTO, *SCORES))
    if name == AUTO:
        fitting = (key for key, score in SCORES.items() if key != JUDGE and not any(map(score.lacks, questions)))
        name = next(fitting, JUDGE)
        if name == JUDGE and not judge:
            raise HydrajaxError("score: no score but a judge's fits these questions; give --judge and --judge-model")
    if judge and name != JUDGE:
        raise HydrajaxError(f"judge: the score {name} asks no judge; add --score judge")
    for question in questions:
        if lacking := SCORES[name].lacks(question):
            raise HydrajaxError(f"score: {name} needs {lacking}; question {shown(question.question_id)} has none")
    if name == CODE and not run_code:
        raise HydrajaxError("run_code: pass@1 runs the generated code in a sandbox; add --run-code to permit it")
    if name == JUDGE:
        if not judge or not judge_model:
            raise HydrajaxError(f"{'judge_model' if judge else 'judge'}: is needed for the score judge")
        return JUDGE, Judge.of_environment(judge, judge_model)
    return name, SCORES[name]()
