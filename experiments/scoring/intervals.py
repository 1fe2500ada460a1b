"""Mean scores and paired differences with bootstrap intervals, by category of question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hydrajax.bench.questions.sets import Question
from hydrajax.bench.questions.summary import bootstrap_counts, group_by_category


@dataclass(frozen=True)
class ScoreFigures:
    """One contender's score in one metric, over the questions of a category that every contender has a value for.

    Attributes:
        questions: number of those questions.
        mean: mean score.
        low, high: its 95% bootstrap interval; None for a single question.
        difference: mean of the per-question differences to the baseline.
        difference_low, difference_high: its 95% bootstrap interval; None for a single question.
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
    """Summarise ``values[model_id][question_id][metric]`` as ``[model_id][category][metric]``.

    Categories are those of `hydrajax.bench.questions.summary.summarise`. A category without a question that every
    contender has a value for is left out.
    """
    found = {model_id: {} for model_id in values}
    for name, ids in group_by_category(questions).items():
        for metric in metrics:
            shared = [key for key in ids if all(metric in own.get(key, {}) for own in values.values())]
            plain = np.array([values[baseline][key][metric] for key in shared])
            for model_id in values if shared else ():
                own = np.array([values[model_id][key][metric] for key in shared])
                mean, difference = mean_interval(own), mean_interval(own - plain)
                found[model_id].setdefault(name, {})[metric] = ScoreFigures(len(shared), *mean, *difference)
    return found


def mean_interval(values: np.ndarray) -> tuple[float, float | None, float | None]:
    """Return the mean of per-question values and its 95% bootstrap interval over questions."""
    count = len(values)
    if count < 2:
        return float(values.mean()), None, None
    low, high = np.percentile(bootstrap_counts(count) @ values / count, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)
