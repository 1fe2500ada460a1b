"""Counts of speculative steps, under vLLM's names (docs/serving.md)."""

from collections.abc import Sequence
from typing import Any


class DraftCounts:
    """The speculative steps of a sequence, or of all sequences of a model.

    Attributes:
        histogram: steps by accepted draft tokens, from 0 to the depth of the tree.
        drafted: candidates, which are the nodes of the trees without their roots.
    """

    def __init__(self, depth: int):
        self.histogram, self.drafted = [0] * (depth + 1), 0

    def add(self, candidates: int, emitted: Sequence[int]) -> None:
        """Add speculative steps with this number of candidates each, by their emitted tokens, root included."""
        for count in emitted:
            self.histogram += [0] * (count - len(self.histogram))  # a grammar forces more tokens than the tree is deep
            self.histogram[count - 1] += 1
        self.drafted += candidates * len(emitted)

    @property
    def steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(count * steps for count, steps in enumerate(self.histogram))

    @property
    def accepted_at(self) -> list[int]:
        """Accepted tokens by depth below the root, from the first on."""
        return [sum(self.histogram[depth:]) for depth in range(1, len(self.histogram))]

    def summary(self) -> dict[str, Any]:
        """Return the fields of vLLM's ``metrics.speculative_decoding``."""
        steps, accepted = self.steps, self.accepted
        return {
            "mean_acceptance_length": 1 + accepted / max(steps, 1),
            "draft_acceptance_rate": accepted / max(self.drafted, 1),
            "acceptance_histogram": self.histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": len(self.histogram) - 1,
        }
