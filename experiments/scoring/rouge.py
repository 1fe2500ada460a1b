"""ROUGE-1, ROUGE-2 and ROUGE-L of summaries against a reference (Lin 2004), from the `rouge-score` package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError
from scoring.score_protocol import Scored

REFERENCES = ("highlights", "summary")  # as CNN/DailyMail and XSum name them; the first present is used
NAMES = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}


class Rouge:
    """F1 of each, with Porter's stemmer. Raises `HydrajaxError` if `rouge-score` is not installed."""

    metrics: ClassVar[dict[str, float]] = dict.fromkeys(NAMES, 100)

    def __init__(self):
        try:
            from rouge_score import rouge_scorer  # imports nltk
        except ImportError:
            raise HydrajaxError("score: ROUGE needs rouge-score: pip install rouge-score") from None
        self._scorer = rouge_scorer.RougeScorer(list(NAMES.values()), use_stemmer=True)

    @staticmethod
    def lacks(question: Question) -> str | None:
        return None if _reference(question) else f"one of {', '.join(REFERENCES)}"

    def identity(self) -> dict[str, Any]:
        return {"version": 1, "stemmer": "Porter"}

    def of(self, question: Question, texts: Sequence[str]) -> Scored:
        found = self._scorer.score(_reference(question), texts[-1])
        return Scored({name: found[key].fmeasure for name, key in NAMES.items()})


def _reference(question: Question) -> str | None:
    texts = [question.record.get(name) for name in REFERENCES]
    return next((text for text in texts if isinstance(text, str) and text.strip()), None)
