"""GSM8K: exact match of the last number of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar

from hydrajax.bench.questions.sets import Question
from scoring.score_protocol import Scored

# A dash after a number or a word is not a minus sign. Commas separate groups of three digits, so "1,2" is two numbers.
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"(?:(?<![\w.)])-)?\$?(?:{DIGITS})")
REFERENCE = re.compile(r"####\s*(.+)")


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, without dollar signs and thousands separators."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace("$", "").replace(",", "")) if found else None


class ExactMatch:
    """Share of answers whose last number equals the one after the reference's ``####``; 42 equals 42.00."""

    metrics: ClassVar[dict[str, float]] = {"exact match": 100}

    @staticmethod
    def lacks(question: Question) -> str | None:
        return None if _reference(question) is not None else "an answer that ends in '#### NUMBER'"

    def identity(self) -> dict[str, Any]:
        return {"version": 1}

    def of(self, question: Question, texts: Sequence[str]) -> Scored:
        wanted, found = _reference(question), last_number(texts[-1])
        return Scored({"exact match": float(found == wanted)}, {"found": None if found is None else str(found)})


def _reference(question: Question) -> Decimal | None:
    answer = question.record.get("answer")
    match = REFERENCE.search(answer) if isinstance(answer, str) else None
    return last_number(match[1]) if match else None
