"""The scores by name, and which of them belongs to a set."""

from __future__ import annotations

from collections.abc import Sequence

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.questions.scores.exact_match import ExactMatch
from hydrajax.questions.scores.judge import Judge
from hydrajax.questions.scores.pass_at_1 import PassAt1
from hydrajax.questions.scores.rouge import Rouge
from hydrajax.questions.scores.score import Score
from hydrajax.questions.sets import Question
from hydrajax.text.jsonl import shown

AUTO, NONE = "auto", "none"
JUDGE, CODE = "judge", "humaneval"
SCORES: dict[str, type[Score]] = {CODE: PassAt1, "gsm8k": ExactMatch, "rouge": Rouge, JUDGE: Judge}


def choose(
    name: str,
    questions: Sequence[Question],
    *,
    run_code: bool = False,
    judge: str | None = None,
    judge_model: str | None = None,
) -> tuple[str, Score | None, str]:
    """``(name, score, note)`` of the score asked for; no score for `NONE`, and where `AUTO` finds none that belongs.

    name: of `SCORES`, `AUTO` or `NONE`. run_code: whether code that a model wrote may be run. judge, judge_model: the
    address and the name of a judge. note: why a score that belongs to the set is not taken, else "".

    Raises `HydrajaxError` where a score that was named cannot be had, and for a judge that nothing asks.
    """
    if name not in (AUTO, NONE, *SCORES):
        raise not_allowed("score", name, (AUTO, NONE, *SCORES))
    chosen = _belonging(questions, judge) if name == AUTO else name
    if judge and chosen != JUDGE:
        raise HydrajaxError(f"judge: has no meaning with the score {chosen}; --score judge asks it")
    if chosen == NONE:
        return NONE, None, ""
    for question in questions:
        if lacking := SCORES[chosen].lacks(question):
            where = f"question {shown(question.question_id)}"
            raise HydrajaxError(f"score: {chosen} needs {lacking}, which {where} has not")
    try:
        if chosen == CODE and not run_code:
            raise HydrajaxError("run_code: is needed for pass@1, which runs what the model wrote, in a sandbox")
        if chosen == JUDGE:
            if not judge or not judge_model:
                raise HydrajaxError(f"{'judge_model' if judge else 'judge'}: is needed for the score judge")
            return JUDGE, Judge.of_environment(judge, judge_model), ""
        return chosen, SCORES[chosen](), ""
    except HydrajaxError as error:
        if name != AUTO or chosen == JUDGE:
            raise
        return NONE, None, f"not scored: {error.as_flag(('--run-code', '--score'))}"


def _belonging(questions: Sequence[Question], judge: str | None) -> str:
    for name, score in SCORES.items():
        if name != JUDGE and not any(map(score.lacks, questions)):
            return name
    return JUDGE if judge else NONE
