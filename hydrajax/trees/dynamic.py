"""Dynamic trees: the drafter chooses the shape at every step (EAGLE-2, Li et al. 2024; DDTree; JetSpec)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hydrajax.errors import HydrajaxError
from hydrajax.trees.choices import MAX_NODES
from hydrajax.trees.static_tree import TreeTopology, check_depth


@dataclass(frozen=True)
class DynamicTree:
    """The size of a dynamic tree; its nodes depend on the text. Immutable and hashable, like `TreeTopology`.

    Of the top_k + expansions * top_k ** 2 candidates, the N - 1 most likely become nodes; with drawn candidates, those
    in the most valuable places (`hydrajax.drafters.growing.grow`).

    Attributes:
        size: N, number of nodes, root included.
        expansions: How often the best candidates of the last level are expanded after the root.
        top_k: Number of candidates expanded each time, and of children that each gets.
        estimates: Drafters report how likely each path is (`with_estimates`).

    Raises:
        HydrajaxError: For sizes out of range, or fewer candidates than nodes.
    """

    size: int
    expansions: int
    top_k: int
    estimates: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    def __post_init__(self):
        if not 2 <= self.size <= MAX_NODES:
            raise HydrajaxError(
                f"tree: got a dynamic tree of {self.size} nodes, expected 2 to {MAX_NODES}, root included"
            )
        if self.expansions < 0 or self.top_k < 1:
            raise HydrajaxError(
                f"tree: got {self.expansions} expansions of {self.top_k} nodes, expected at least 0 of at least 1 node"
            )
        candidates = self.top_k + self.expansions * self.top_k**2
        if candidates < self.size - 1:
            raise HydrajaxError(
                f"tree: {self.name} has {candidates} candidates (K + D * K * K), too few for {self.size - 1} nodes "
                "below the root"
            )

    @property
    def name(self) -> str:
        """The name that `hydrajax.trees.presets.by_name` accepts."""
        return f"dynamic-{self.size}-{self.expansions}-{self.top_k}"

    @property
    def depth(self) -> int:
        """K, the maximum length of a path."""
        return min(self.expansions + 1, self.size - 1)

    def check(self, draft_depth: int, vocab_size: int) -> None:
        """Check the tree for a drafter of ``draft_depth`` tokens over ``vocab_size`` tokens; raises `HydrajaxError`."""
        check_depth(self.expansions + 1, draft_depth)
        self.check_children(self.top_k, vocab_size)

    def check_children(self, n_children: int, vocab_size: int) -> None:
        """Raise `HydrajaxError` if a node would have more children than there are tokens."""
        if n_children > vocab_size:
            raise HydrajaxError(
                f"tree: got {n_children} children per node, expected at most the vocabulary of {vocab_size} tokens"
            )

    @property
    def most_children(self) -> int:
        """The maximum number of children of a node."""
        return min(self.top_k, self.size - 1)

    def beams(self) -> DynamicTree:
        """Return the tree whose sizes `hydrajax.drafters.growing.grow` follows."""
        return self

    def reaching(self, draft_depth: int) -> DynamicTree:
        """Return the tree for a drafter of ``draft_depth`` tokens, if the depth is the drafter's choice."""
        del draft_depth
        return self


@dataclass(frozen=True)
class BestFirstTree(DynamicTree):
    """A dynamic tree grown best-first, as deep as the drafter.

    ``best-N`` takes the N - 1 most likely nodes (DDTree, arXiv 2604.12989). ``fanout-N-K`` expands the most likely node
    into its K most likely children, again and again until there are N nodes (JetSpec, arXiv 2606.18394).

    Attributes:
        expansions: -1 without a drafter, which determines the depth (`reaching`).
        top_k: K; 0 for ``best-N``, whose nodes have as many children as are likely.
    """

    expansions: int = -1
    top_k: int = 0

    def __post_init__(self):
        if not 2 <= self.size <= MAX_NODES:
            raise HydrajaxError(f"tree: got {self.name}, expected 2 to {MAX_NODES} nodes, root included")
        if self.top_k < 0 or self.expansions < -1:
            raise HydrajaxError(
                f"tree: got {self.top_k} children and {self.expansions} expansions, expected at least 0"
            )

    @property
    def name(self) -> str:
        return f"fanout-{self.size}-{self.top_k}" if self.top_k else f"best-{self.size}"

    @property
    def most_children(self) -> int:
        return min(self.top_k or self.size, self.size - 1)

    @property
    def depth(self) -> int:
        if self.expansions < 0:
            raise HydrajaxError(f"tree: got {self.name} without a drafter, expected it in a Program")
        return super().depth

    def check(self, draft_depth: int, vocab_size: int) -> None:
        self.reaching(draft_depth)
        self.check_children(self.top_k, vocab_size)

    def reaching(self, draft_depth: int) -> BestFirstTree:
        if draft_depth < 1:
            raise HydrajaxError(f"tree: got {self.name}, expected root: the draft proposes no token")
        return dataclasses.replace(self, expansions=min(draft_depth, self.size - 1) - 1)

    def beams(self) -> DynamicTree:
        # A node of ``best-N`` is among the N - 1 most likely of its level, and so is its parent.
        return DynamicTree(self.size, self.expansions, self.most_children, estimates=self.estimates)


CandidateTree = TreeTopology | DynamicTree


def with_estimates(tree: CandidateTree, more: int = 0) -> CandidateTree:
    """Return a tree whose proposals have `hydrajax.drafters.drafter.Proposal.log_p`, for drafts that are merged.

    Args:
        more: Nodes to add to a dynamic tree, as far as it has candidates.
    """
    if not isinstance(tree, DynamicTree):
        return dataclasses.replace(tree, estimates=True)
    beams = tree.beams()
    candidates = beams.top_k + beams.expansions * beams.top_k**2
    return dataclasses.replace(tree, size=min(tree.size + more, candidates + 1), estimates=True)


def guesses_of(tree: CandidateTree) -> list[tuple[int, int]]:
    """Return for each level the number of nodes after which tokens are predicted, and the number of ranked guesses."""
    if isinstance(tree, BestFirstTree) and tree.top_k:
        return [(1, tree.top_k)] * tree.depth
    if isinstance(tree, DynamicTree):
        beams = tree.beams()
        return [(1, beams.top_k), *[(beams.top_k, beams.top_k)] * beams.expansions]
    return [(len(level.parents), level.width) for level in tree.levels]


def static(tree: CandidateTree, purpose: str) -> TreeTopology:
    """Return the tree if it is static, else raise `HydrajaxError`; ``purpose`` names what needs a static tree."""
    if isinstance(tree, DynamicTree):
        raise HydrajaxError(f"tree: got {tree.name}, expected a static tree for {purpose}")
    return tree
