"""Tokens per step of a tree, simulated from one teacher-forced pass over text.

A step at position t drafts from the base's state there, emits the text's next token as the root, and accepts the
longest path of guesses that continues the text. This depends only on the rank of every true token among its head's
guesses, and the heads' inputs along the true path are the teacher-forced ones. On text that the base itself generated
(greedily or sampled) the simulation equals decoding with the greedy rule (or exact sampling), step for step; on other
text it shows how well the heads would do if the base wrote this text.
"""

import numpy as np
from jaxtyping import Int

from hydrajax.trees.static_tree import TreeTopology


def accepted_lengths(tree: TreeTopology, ranks: Int[np.ndarray, " K *positions"]) -> Int[np.ndarray, "*positions"]:
    """Return the depth of the tree's longest path with the given ranks."""
    children = np.full((tree.size + 1, tree.max_rank + 2), tree.size)
    for node in range(1, tree.size):
        children[tree.parents[node], tree.choices[node - 1][-1]] = node
    node = np.zeros(ranks.shape[1:], int)
    depth = np.zeros(ranks.shape[1:], int)
    for k in range(tree.depth):
        node = children[node, np.minimum(ranks[k], children.shape[1] - 1)]  # row tree.size: no child
        depth += node < tree.size
    return depth


def walk(accepted: Int[np.ndarray, " positions"], start: int, end: int) -> list[int]:
    """Return the positions from which the steps draft that emit the tokens ``[start, end)`` of a row.

    Args:
        accepted: `accepted_lengths` at every position of the row.
        end: End of the tokens. The root of a step is the token after the position it drafts from; the last step emits
            no token beyond the end.
    """
    steps = []
    while start < end:
        steps.append(start - 1)
        start += 1 + min(int(accepted[start - 1]), end - start - 1)
    return steps


def runs(counted: np.ndarray, owner: np.ndarray) -> list[tuple[int, int]]:
    """Return runs ``[start, end)`` of counted tokens of one owner, each after at least one token of that owner."""
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
