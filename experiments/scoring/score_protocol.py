"""Interface of a score: values for the answers to one question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from hydrajax.bench.questions.sets import Question


@dataclass(frozen=True)
class Scored:
    """Values by metric, and their derivation for readers of the score file."""

    values: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


class Score(Protocol):
    """A score; ``metrics`` maps its metrics to the factor that tables multiply them by (100 for shares)."""

    metrics: ClassVar[dict[str, float]]

    @staticmethod
    def lacks(question: Question) -> str | None:
        """Return the missing fields of a question, in words; None if it has all."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that values depend on."""

    def of(self, question: Question, texts: Sequence[str]) -> Scored | None:
        """Score the answers to the question's turns; None without a value."""
