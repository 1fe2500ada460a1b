"""Proposal trees T_1 .. T_N that accept the most tokens for their size (hydra section 4, medusa 2.3.3). NumPy only.

A node adds to the expected accept length the probability that its path is the text's continuation, whatever else the
tree holds. A path is never likelier than its prefix, so the N most likely paths form a tree, the best of its size:
adding the most likely child repeatedly is optimal.

Probabilities of paths come from ``ranks [K, steps]``: the rank of each true token among its head's guesses
(`hydrajax.drafters.ranks`), one column per position where a step may begin.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from hydrajax.bench.trees.simulation import walk
from hydrajax.bench.trees.speculation import expected_tokens
from hydrajax.errors import HydrajaxError
from hydrajax.trees.choices import Choice
from hydrajax.trees.static_tree import TreeTopology

WIDEST = 64  # higher ranks are ignored: no released tree has a child beyond rank 17


@dataclass(frozen=True)
class Proposals:
    """The best trees of every size.

    Attributes:
        choices: In the order in which they are added.
        tokens_per_step: Expected tokens per step of T_1 .. T_N; the root alone emits one.
    """

    choices: tuple[Choice, ...]
    tokens_per_step: tuple[float, ...]

    @property
    def largest(self) -> int:
        return len(self.tokens_per_step)

    def tree(self, size: int) -> TreeTopology:
        """Return T_size; raises `HydrajaxError` for a size that was not searched."""
        if not 1 <= size <= self.largest:
            raise HydrajaxError(f"tree: got size {size}, expected 1 to {self.largest}, which were searched")
        return TreeTopology.from_choices(self.choices[: size - 1])


def chains(acceptance: float, depth: int, largest: int) -> Proposals:
    """Return chains up to ``depth`` whose tokens are accepted with equal probability (Leviathan et al. 2023, 3.1)."""
    depth = min(depth, largest - 1)
    choices = tuple((0,) * length for length in range(1, depth + 1))
    return Proposals(choices, tuple(expected_tokens(acceptance, k) for k in range(depth + 1)))


def independent(accuracies: Float[np.ndarray, "K R"], largest: int) -> Proposals:
    """Return the trees for heads that are independent of each other (medusa 2.3.3).

    They are grown from the root by the most likely child; ties go to the shorter path, then to lower ranks.

    Args:
        accuracies: ``[k, r]`` is the probability that the guess of rank r of head k is right; a path's is their
            product.
    """
    frontier: list[tuple[float, int, Choice]] = []

    def open_up(path: Choice, probability: float) -> None:
        for rank, accuracy in enumerate(accuracies[len(path)] if len(path) < len(accuracies) else ()):
            if accuracy > 0:
                heapq.heappush(frontier, (-probability * float(accuracy), len(path) + 1, (*path, rank)))

    open_up((), 1.0)
    choices, expected = [], [1.0]
    while frontier and len(expected) < largest:
        chance, _, path = heapq.heappop(frontier)
        choices.append(path)
        expected.append(expected[-1] - chance)
        open_up(path, -chance)
    return Proposals(tuple(choices), tuple(expected))


def accuracies(ranks: Int[np.ndarray, "K steps"]) -> Float[np.ndarray, "K R"]:
    """Return how often each head's guess of each rank was right, for `independent`."""
    return np.stack([np.bincount(row[row < WIDEST], minlength=WIDEST) / max(row.size, 1) for row in ranks])


def simulated(ranks: Int[np.ndarray, "K rows T"], spans: Sequence[tuple[int, int, int]], largest: int) -> Proposals:
    """Return Hydra's trees: decode the corpus with the present tree and add the child that would have helped most
    often.

    A tree decides where its steps begin: after a rejected guess, where the text is harder than on average. Counts are
    therefore recomputed for every size, over the steps of a `walk` with the present tree. This costs one pass over
    ``ranks`` in host memory per size and no model.

    Args:
        ranks: int32 ``[K, rows, T]``.
        spans: ``(row, start, end)`` of the tokens to be emitted.
    """
    n_heads, _, length = ranks.shape
    flat = ranks.reshape(n_heads, -1)
    members = {(): np.arange(flat.shape[1])}  # of each node: the positions whose text begins with its path
    offered: dict[Choice, np.ndarray] = {}  # of each child not yet added
    accepted = np.zeros(flat.shape[1], int)
    n_tokens = sum(end - start for _, start, end in spans)

    def open_up(path: Choice) -> None:
        if len(path) < n_heads:
            found = flat[len(path), members[path]]
            for rank in np.unique(found[found < WIDEST]).tolist():
                offered[*path, rank] = members[path][found == rank]

    def steps() -> tuple[np.ndarray, np.ndarray]:
        """Return where steps begin, and how many tokens after the root each may still emit."""
        begun, room = [], []
        for row, start, end in spans:
            found = walk(accepted[row * length : (row + 1) * length], start, end)
            begun += [row * length + at for at in found]
            room += [end - at - 2 for at in found]
        return np.array(begun, int), np.array(room, int)

    open_up(())
    choices, expected = [], []
    while True:
        begun, room = steps()
        expected.append(n_tokens / max(len(begun), 1))
        if len(expected) == largest or not offered:
            return Proposals(tuple(choices), tuple(expected))
        left = np.full(flat.shape[1], -1)
        left[begun] = room
        gains = {path: int(np.sum(left[at] >= len(path))) for path, at in offered.items()}
        best = min(gains, key=lambda path: (-gains[path], len(path), path))
        if gains[best] == 0:
            return Proposals(tuple(choices), tuple(expected))
        members[best] = offered.pop(best)
        accepted[members[best]] = np.maximum(accepted[members[best]], len(best))
        choices.append(best)
        open_up(best)
