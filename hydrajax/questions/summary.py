"""What the answers come to: tokens per step and per second of every contender, and scores, by category of question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hydrajax.questions.sets import Question

RESAMPLES = 2000
OVERALL = "overall"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Figures:
    """A contender's answers to the questions of a category.

    tokens_per_step: mean of ``accept_lengths``, root counted. tokens_per_second: of all tokens in all the time, prompts
    included. speedup: its ratio to the baseline's on the same questions; low and high: its 95% interval, questions
    drawn again with replacement (None of a single question). different: questions with another output than the
    baseline's, or with several in the repeats; None where the rule does not promise the same.
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
    """``[model_id][category]`` for each category of the questions, and for all as ``overall``.

    Where others stand beside them, the eight categories of MT-Bench are also taken together, as Spec-Bench does.
    same_outputs: the rule promises every contender the baseline's output.
    """
    groups = _groups(questions)

    def choices(model_id: str, name: str) -> list[dict]:
        return [answers[model_id][question_id]["choices"][0] for question_id in groups[name]]

    return {
        model_id: {name: _figures(choices(model_id, name), choices(baseline, name), same_outputs) for name in groups}
        for model_id in answers
    }


def _groups(questions: Sequence[Question]) -> dict[str, list[int | str]]:
    """The ids of the questions of each category."""
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
    """Per question, over its turns."""
    return np.array([sum(choice[field]) for choice in choices], float)


def speedup_interval(
    tokens: np.ndarray, seconds: np.ndarray, plain_tokens: np.ndarray, plain_seconds: np.ndarray
) -> tuple[float, float | None, float | None]:
    """The ratio of two rates from per-question totals, and its 95% bootstrap interval over questions."""

    def ratio(totals):
        return (totals[0] / totals[1]) / (totals[2] / totals[3])

    columns = np.stack([tokens, seconds, plain_tokens, plain_seconds])
    speedup, count = float(ratio(columns.sum(axis=1))), columns.shape[1]
    if count < 2:
        return speedup, None, None
    # A question's two rates stay together, for they were measured side by side.
    low, high = np.percentile(ratio(columns @ _drawn(count).T), [2.5, 97.5])
    return speedup, float(low), float(high)


def _drawn(count: int) -> np.ndarray:
    """How often each of so many questions is drawn, with replacement, in each of `RESAMPLES` draws of as many."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreFigures:
    """A contender's score in a metric, over the questions of a category that all contenders have a figure for.

    mean: of the questions; low, high: its 95% bootstrap interval. difference: the mean of each question's score less
    the baseline's for the same question, with its interval. Intervals are None of a single question.
    """

    questions: int
    mean: float
    low: float | None
    high: float | None
    difference: float
    difference_low: float | None
    difference_high: float | None


def summarise_scores(
    values: Mapping[str, Mapping[int | str, Mapping[str, float]]],
    questions: Sequence[Question],
    baseline: str,
    metrics: Sequence[str],
) -> dict[str, dict[str, dict[str, ScoreFigures]]]:
    """``[model_id][category][metric]``, of values by model, question and metric; categories as in `summarise`.

    A category none of whose questions has a figure from all contenders is left out.
    """
    found = {model_id: {} for model_id in values}
    for name, ids in _groups(questions).items():
        for metric in metrics:
            shared = [key for key in ids if all(metric in own.get(key, {}) for own in values.values())]
            plain = np.array([values[baseline][key][metric] for key in shared])
            for model_id in values if shared else ():
                own = np.array([values[model_id][key][metric] for key in shared])
                mean, difference = mean_interval(own), mean_interval(own - plain)
                found[model_id].setdefault(name, {})[metric] = ScoreFigures(len(shared), *mean, *difference)
    return found


def mean_interval(values: np.ndarray) -> tuple[float, float | None, float | None]:
    """The mean of per-question figures, and its 95% bootstrap interval over questions."""
    count = len(values)
    if count < 2:
        return float(values.mean()), None, None
    low, high = np.percentile(_drawn(count) @ values / count, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)
