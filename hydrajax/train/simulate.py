"""Head accuracies and simulated tokens per step on held-out text (`hydrajax.bench.trees.simulation`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.bench.trees.simulation import accepted_lengths, runs, walk
from hydrajax.train.losses import IGNORED
from hydrajax.trees import TreeTopology


class Tally:
    """Sums over batches of head ranks: simulated tokens per step over the targets, and accuracies per head."""

    def __init__(self, tree: TreeTopology, num_draft_heads: int, top_k: int):
        self._tree, self._top_k = tree, top_k
        self._tokens = self._steps = 0
        self._hits = np.zeros((top_k, num_draft_heads), int)
        self._counts = np.zeros(num_draft_heads, int)

    def add(
        self,
        ranks: Int[np.ndarray, "K B T"],
        labels: Int[np.ndarray, "B T"],
        segments: Int[np.ndarray, "B T"] | None = None,
    ) -> None:
        num_draft_heads, batch, length = ranks.shape
        owner = np.ones_like(labels) if segments is None else segments
        for k in range(num_draft_heads):
            shift = k + 2
            counted = (labels[:, shift:] != IGNORED) & (owner[:, shift:] == owner[:, :-shift])
            found = ranks[k, :, : length - shift][counted]
            self._counts[k] += found.size
            self._hits[:, k] += (found[None] < np.arange(1, self._top_k + 1)[:, None]).sum(axis=1)
        accepted = accepted_lengths(self._tree, ranks)
        for index in range(batch):
            for start, end in runs(labels[index] != IGNORED, owner[index]):
                self._tokens += end - start
                self._steps += len(walk(accepted[index], start, end))

    def report(self) -> dict[str, Any]:
        """Return ``tokens_per_step``, and ``top1``, ``top2``, ... as lists over heads."""
        rates = {f"top{k}": (hits / np.maximum(self._counts, 1)).tolist() for k, hits in enumerate(self._hits, start=1)}
        return {"tokens_per_step": self._tokens / max(self._steps, 1)} | rates
