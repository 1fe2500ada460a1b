"""Dynamic trees (EAGLE-2, Li et al. 2024): what is known of a tree whose shape the drafter decides at every step."""

from __future__ import annotations

from dataclasses import dataclass

from hydrajax.errors import HydrajaxError
from hydrajax.trees.static_tree import MAX_NODES, TreeTopology


@dataclass(frozen=True)
class DynamicTree:
    """How far a tree is grown; which nodes it has depends on the text. Immutable and hashable, as `TreeTopology`.

    size:       N, nodes with the root, of every tree.
    expansions: how often the best candidates of the last level are expanded, after the root.
    top_k:      how many are expanded each time, and how many children each gets as candidates.

    Of all candidates, top_k + expansions * top_k ** 2, the likeliest N - 1 become nodes; of drawn ones those in the
    places that are worth most (`hydrajax.drafters.growing.grow`). Raises `HydrajaxError` for numbers that make no
    sense, or fewer candidates than nodes.
    """

    size: int
    expansions: int
    top_k: int

    def __post_init__(self):
        if not 2 <= self.size <= MAX_NODES:
            raise HydrajaxError(f"tree: a dynamic tree has 2 to {MAX_NODES} nodes, root included, found {self.size}")
        if self.expansions < 0 or self.top_k < 1:
            raise HydrajaxError(
                "tree: a dynamic tree needs at least 0 expansions, of 1 node or more, "
                f"found {self.expansions} of {self.top_k}"
            )
        candidates = self.top_k + self.expansions * self.top_k**2
        if candidates < self.size - 1:
            raise HydrajaxError(
                f"tree: {self.name} has {candidates} candidates (K + D * K * K), too few for {self.size - 1} nodes "
                "below the root"
            )

    @property
    def name(self) -> str:
        """What `hydrajax.trees.presets.by_name` calls it."""
        return f"dynamic-{self.size}-{self.expansions}-{self.top_k}"

    @property
    def depth(self) -> int:
        """K, which no path exceeds."""
        return min(self.expansions + 1, self.size - 1)

    def check(self, draft_depth: int, vocab_size: int) -> None:
        """Refuse a tree that a drafter of ``draft_depth`` heads over ``vocab_size`` tokens cannot grow."""
        if self.expansions + 1 > draft_depth:
            raise HydrajaxError(
                f"tree: {self.name} looks {self.expansions + 1} tokens ahead, the drafter proposes {draft_depth}"
            )
        if self.top_k > vocab_size:
            raise HydrajaxError(f"tree: {self.top_k} children do not exist in a vocabulary of {vocab_size} tokens")


CandidateTree = TreeTopology | DynamicTree


def guesses_of(tree: CandidateTree) -> list[tuple[int, int]]:
    """Of each level, after how many nodes it is guessed what follows, and how many guesses are ranked."""
    if isinstance(tree, DynamicTree):
        return [(1, tree.top_k), *[(tree.top_k, tree.top_k)] * tree.expansions]
    return [(len(level.parents), level.width) for level in tree.levels]


def static(tree: CandidateTree, purpose: str) -> TreeTopology:
    """The tree itself if it is the same at every step. purpose: what needs such a one, for the message else."""
    if isinstance(tree, DynamicTree):
        raise HydrajaxError(f"tree: {tree.name} has another shape at every step, {purpose} needs one that stays")
    return tree
