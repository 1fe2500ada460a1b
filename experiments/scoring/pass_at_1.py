"""HumanEval: share of generated programs that pass the problem's tests (Chen et al. 2021, arXiv:2107.03374)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from hydrajax.bench.questions.sets import Question
from scoring.sandbox import PASSED, Limits, run_confined
from scoring.score_protocol import Scored

# Stop sequences of the paper's section 3.2, which end the function.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
FIELDS = ("prompt", "test", "entry_point")


def program(prompt: str, text: str, entry_point: str) -> str:
    """Return the prompt followed by the answer.

    A completion ends at the first of `STOPS`. Chat models write the whole function in a code fence instead: the first
    block that defines it follows the prompt and overrides its definition.
    """
    for block in FENCED.findall(text):
        if re.search(rf"^def {re.escape(entry_point)}\b", block, re.MULTILINE):
            return f"{prompt.rstrip()}\n\n\n{block}"
    ends = [at for at in map(text.find, STOPS) if at >= 0]
    return prompt + text[: min(ends, default=len(text))]


@dataclass(frozen=True)
class PassAt1:
    """pass@1 of one answer per problem: the share whose ``check`` returns in the sandbox."""

    limits: Limits = field(default_factory=Limits)
    metrics: ClassVar[dict[str, float]] = {"pass@1": 100}

    @staticmethod
    def lacks(question: Question) -> str | None:
        missing = [name for name in FIELDS if not isinstance(question.record.get(name), str)]
        return ", ".join(missing) or None

    def identity(self) -> dict[str, Any]:
        return {"version": 1} | asdict(self.limits)

    def of(self, question: Question, texts: Sequence[str]) -> Scored:
        prompt, test, entry_point = (question.record[name] for name in FIELDS)
        outcome = run_confined([program(prompt, texts[-1], entry_point), test], ("check", entry_point), self.limits)
        return Scored({"pass@1": float(outcome == PASSED)}, {"outcome": outcome})
