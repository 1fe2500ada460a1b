"""How many tokens a tree would have emitted per step, from one teacher-forced pass over text.

A step at position t drafts from the base's state there, emits the text's next token as the root, and accepts the
longest path of guesses that is the text's continuation. Whether a path holds it depends only on the rank of every true
token among its head's guesses, and the heads' inputs along the true path are the teacher-forced ones. On text that the
base itself has generated (greedily, or sampled at a temperature) this is what decoding with the greedy rule (or with
exact sampling) does, step for step; on other text it says how well the heads would do if the base wrote like that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hydrajax.drafters.drafter import BoundBase, Drafter
from hydrajax.train.chunks import chunk_width, into_chunks
from hydrajax.train.forward import row_layout
from hydrajax.train.losses import IGNORED
from hydrajax.train.step import Batch
from hydrajax.trees import TreeTopology


def head_ranks(
    drafter: Drafter, params, features, batch: Batch, base: BoundBase, chunk_tokens: int
) -> Int[Array, "K B T"]:
    """The rank (0: the best guess) that head k at position t gives to the text's token t + 2 + k, int32.

    Positions without such a token hold garbage. Of equal logits the smaller id ranks first, as in top-k.
    """
    tokens, segments = batch["tokens"], batch.get("segments")
    positions, mask = row_layout(tokens, segments)
    read = drafter.teacher_hidden(params, features, tokens, base, None, positions, mask)
    width = chunk_width(chunk_tokens, tokens.shape)

    def one_head(k):
        def rank(chunk):
            hidden, wanted = chunk
            logits = drafter.head_logits(params, k, hidden, base)
            chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)
            before = jnp.arange(logits.shape[-1]) < wanted[..., None]
            return jnp.sum((logits > chosen) | ((logits == chosen) & before), axis=-1, dtype=jnp.int32)

        chunks = into_chunks((read[k], jnp.roll(tokens, -(k + 2), axis=1)), width)
        ranks = jax.lax.map(rank, chunks)  # [chunks, B, width]
        return jnp.moveaxis(ranks, 0, 1).reshape(tokens.shape[0], -1)[:, : tokens.shape[1]]

    return jnp.stack([one_head(k) for k in range(drafter.depth)])


def accepted_lengths(tree: TreeTopology, ranks: Int[np.ndarray, "K *positions"]) -> Int[np.ndarray, "*positions"]:
    """The depth of the longest path of the tree whose ranks are the given ones."""
    children = np.full((tree.size + 1, tree.max_rank + 2), tree.size)
    for node in range(1, tree.size):
        children[tree.parents[node], tree.choices[node - 1][-1]] = node
    node = np.zeros(ranks.shape[1:], int)
    depth = np.zeros(ranks.shape[1:], int)
    for k in range(tree.depth):
        node = children[node, np.minimum(ranks[k], children.shape[1] - 1)]  # row tree.size: no way on
        depth += node < tree.size
    return depth


class Tally:
    """Adds up batches of `head_ranks`: tokens per step of walks over the targets, accuracies of every head."""

    def __init__(self, tree: TreeTopology, n_heads: int, top_k: int):
        self._tree, self._top_k = tree, top_k
        self._tokens = self._steps = 0
        self._hits = np.zeros((top_k, n_heads), int)
        self._counts = np.zeros(n_heads, int)

    def add(
        self,
        ranks: Int[np.ndarray, "K B T"],
        labels: Int[np.ndarray, "B T"],
        segments: Int[np.ndarray, "B T"] | None = None,
    ) -> None:
        n_heads, batch, length = ranks.shape
        owner = np.ones_like(labels) if segments is None else segments
        for k in range(n_heads):
            shift = k + 2
            counted = (labels[:, shift:] != IGNORED) & (owner[:, shift:] == owner[:, :-shift])
            found = ranks[k, :, : length - shift][counted]
            self._counts[k] += found.size
            self._hits[:, k] += (found[None] < np.arange(1, self._top_k + 1)[:, None]).sum(axis=1)
        accepted = accepted_lengths(self._tree, ranks)
        for row in range(batch):
            for start, end in runs(labels[row] != IGNORED, owner[row]):
                self._tokens += end - start
                while start < end:  # the root is the token at `start`, drafted from the state before it
                    start += 1 + min(accepted[row, start - 1], end - start - 1)
                    self._steps += 1

    def report(self) -> dict[str, Any]:
        """``tokens_per_step``, and ``top1`` ... as lists over heads."""
        rates = self._hits / np.maximum(self._counts, 1)
        report: dict[str, Any] = {"tokens_per_step": self._tokens / max(self._steps, 1)}
        return report | {f"top{k + 1}": rates[k].tolist() for k in range(self._top_k)}


def runs(counted: np.ndarray, owner: np.ndarray) -> list[tuple[int, int]]:
    """Stretches ``[start, end)`` of counted tokens of one owner, each after at least one token of that owner."""
    found = []
    start = None
    for at in range(len(counted) + 1):
        goes_on = at < len(counted) and counted[at] and at > 0 and owner[at] == owner[at - 1]
        if goes_on and start is None:
            start = at
        elif not goes_on and start is not None:
            found.append((start, at))
            start = None
    return found
