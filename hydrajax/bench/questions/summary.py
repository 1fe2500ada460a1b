"""Tokens per step and per second of every contender, by category of question."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hydrajax.bench.questions.sets import Question

RESAMPLES = 2000
OVERALL = "overall"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Figures:
    """One contender's speed on the questions of a category.

    Attributes:
        tokens_per_step: mean of ``accept_lengths``, root included.
        tokens_per_second: all tokens by all seconds, prefill included.
        speedup: ratio to the baseline's tokens_per_second on the same questions.
        low, high: 95% bootstrap interval of ``speedup`` over questions; None for a single question.
        different: number of questions whose output differs from the baseline's or between repeats; None if the rule
            does not promise equal outputs.
    """

    questions: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_step: float
    tokens_per_second: float
    speedup: float
    low: float | None
    high: float | None
    different: int | None

    @property
    def equal(self) -> bool | None:
        return None if self.different is None else self.different == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.equal}


def summarise(
    answers: dict[str, dict[int | str, dict]], questions: Sequence[Question], baseline: str, same_outputs: bool
) -> dict[str, dict[str, Figures]]:
    """Return the figures by model id and category, with all questions as the category ``overall``.

    Args:
        answers: records by model id and question id, as in `AnswerFiles.answers`.
        questions: the questions to count. If they have more categories than MT-Bench's eight, these eight are also
            summarised together as ``mt_bench``, as Spec-Bench does.
        same_outputs: the rule promises that every contender generates the baseline's output.
    """
    groups = group_by_category(questions)

    def choices(model_id: str, name: str) -> list[dict]:
        return [answers[model_id][question_id]["choices"][0] for question_id in groups[name]]

    return {
        model_id: {name: _figures(choices(model_id, name), choices(baseline, name), same_outputs) for name in groups}
        for model_id in answers
    }


def acceptance_lengths(
    answers: dict[str, dict[int | str, dict]], questions: Sequence[Question]
) -> tuple[list[str], list[list[str | float]]]:
    """Return columns and rows of the table that SPEED-Bench's results are published in: a row per model id.

    A question's acceptance length is the mean of its steps, the root included, and a category's the mean of its
    questions (`summarise` weighs steps equally). ``Overall`` is the mean of the categories.
    """
    groups = group_by_category(questions)
    categories, rows = sorted({question.category for question in questions}), []
    for model_id, records in answers.items():
        of = {id_: statistics.mean(record["choices"][0]["accept_lengths"]) for id_, record in records.items()}
        means = [statistics.mean(of[id_] for id_ in groups[category]) for category in categories]
        rows.append([model_id, *means, statistics.mean(means)])
    return ["Model", *categories, "Overall"], rows


def group_by_category(questions: Sequence[Question]) -> dict[str, list[int | str]]:
    """Return question ids by category; see `summarise`."""
    groups = {question.category: [] for question in questions}
    for question in questions:
        groups[question.category].append(question.question_id)
    if set(MT_BENCH) < set(groups):
        groups["mt_bench"] = [q.question_id for q in questions if q.category in MT_BENCH]
    groups[OVERALL] = [question.question_id for question in questions]
    return groups


def _figures(own: list[dict], plain: list[dict], same_outputs: bool) -> Figures:
    tokens, seconds, steps = (_totals(own, field) for field in ("new_tokens", "wall_time", "decoding_steps"))
    plain_tokens, plain_seconds = _totals(plain, "new_tokens"), _totals(plain, "wall_time")
    speedup, low, high = speedup_interval(tokens, seconds, plain_tokens, plain_seconds)
    pairs = zip(own, plain, strict=True)
    different = sum(a["output_ids"] != b["output_ids"] or not a["repeats_agree"] for a, b in pairs)
    return Figures(
        questions=len(own),
        tokens=int(tokens.sum()),
        steps=int(steps.sum()),
        seconds=float(seconds.sum()),
        tokens_per_step=float(tokens.sum() / steps.sum()),
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        speedup=speedup,
        low=low,
        high=high,
        different=different if same_outputs else None,
    )


def _totals(choices: list[dict], field: str) -> np.ndarray:
    return np.array([sum(choice[field]) for choice in choices], float)


def speedup_interval(
    tokens: np.ndarray, seconds: np.ndarray, plain_tokens: np.ndarray, plain_seconds: np.ndarray
) -> tuple[float, float | None, float | None]:
    """Return the ratio of two rates from per-question totals, and its 95% bootstrap interval over questions."""

    def ratio(totals):
        return (totals[0] / totals[1]) / (totals[2] / totals[3])

    columns = np.stack([tokens, seconds, plain_tokens, plain_seconds])
    speedup, count = float(ratio(columns.sum(axis=1))), columns.shape[1]
    if count < 2:
        return speedup, None, None
    # The two rates of a question are resampled together: they were measured at the same time.
    low, high = np.percentile(ratio(columns @ bootstrap_counts(count).T), [2.5, 97.5])
    return speedup, float(low), float(high)


def bootstrap_counts(count: int) -> np.ndarray:
    """Return how often each question occurs in each resample with replacement, shape ``[RESAMPLES, count]``."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
