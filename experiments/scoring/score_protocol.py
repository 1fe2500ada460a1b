"""What a score is: figures for the answers to one question, of which the means are taken elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from hydrajax.questions.sets import Question


@dataclass(frozen=True)
class Scored:
    """values: by the names of the score's ``metrics``. detail: what they come from, for who reads the file."""

    values: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


class Score(Protocol):
    """metrics: what it measures, and the factor by which tables show it: 100 for shares."""

    metrics: ClassVar[dict[str, float]]

    @staticmethod
    def lacks(question: Question) -> str | None:
        """What the question would need to be scored, in words; None where it has all."""

    def identity(self) -> dict[str, Any]:
        """The settings that its values depend on."""

    def of(self, question: Question, texts: Sequence[str]) -> Scored | None:
        """The answers to the question's turns, as they were written. None where there is no figure to be had."""
