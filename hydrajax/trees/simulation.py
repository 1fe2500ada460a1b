"""How many tokens a tree would have emitted per step, from one teacher-forced pass over text.

A step at position t drafts from the base's state there, emits the text's next token as the root, and accepts the
longest path of guesses that is the text's continuation. Whether a path holds it depends only on the rank of every true
token among its head's guesses, and the heads' inputs along the true path are the teacher-forced ones. On text that the
base itself has generated (greedily, or sampled at a temperature) this is what decoding with the greedy rule (or with
exact sampling) does, step for step; on other text it says how well the heads would do if the base wrote like that.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from hydrajax.trees.static_tree import TreeTopology


def accepted_lengths(tree: TreeTopology, ranks: Int[np.ndarray, " K *positions"]) -> Int[np.ndarray, "*positions"]:
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


def walk(accepted: Int[np.ndarray, " positions"], start: int, end: int) -> list[int]:
    """Positions from which the steps draft that emit the tokens ``[start, end)`` of a row.

    ``accepted`` are `accepted_lengths` at every position of the row. The root of a step is the token after the
    position it drafts from; the last step emits no token beyond the end.
    """
    steps = []
    while start < end:
        steps.append(start - 1)
        start += 1 + min(int(accepted[start - 1]), end - start - 1)
    return steps


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
