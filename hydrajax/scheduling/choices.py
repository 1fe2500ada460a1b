"""The ways to take a step between which a scheduler chooses: without a draft, or with a tree of one of a few sizes.

Every size is a program per shape, so there are few: none, about a third of the wanted tree, and the wanted tree. Which
one a step takes changes its time and the number of its tokens, never the tokens themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hydrajax.drafters.drafter import DrafterSpec
from hydrajax.scheduling.deferred import KEPT
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree
from hydrajax.trees.static_tree import Choice as Path
from hydrajax.trees.static_tree import TreeTopology

SHARE = 3  # the small tree has one node for this many of the wanted one
SMALLEST = 3  # nodes of a small tree, root included
# A guess of rank r is assumed right this often: p_0 = 0.6, and each further rank 0.3 times the one before. Only the
# order of the products matters, which decides which nodes of a static tree are kept.
FIRST_RANK, NEXT_RANK = 0.6, 0.3


@dataclass(frozen=True)
class StepChoice:
    """One way to take a step.

    Attributes:
        name: "none" or the size of the tree, for reports.
        nodes: Tokens per sequence that the step feeds to the base, root included.
        depth: Maximum number of accepted draft tokens.
        drafts: It has a draft. Without one the draft does not even observe the tokens.
    """

    name: str
    nodes: int
    depth: int
    drafts: bool = True

    @classmethod
    def of(cls, spec: DrafterSpec, tree: CandidateTree) -> StepChoice:
        nodes = spec.verified_nodes(tree)
        return cls(f"{nodes} nodes", nodes, spec.longest_path(tree))


NONE = StepChoice("none", 1, 0, drafts=False)
CATCH_UP = StepChoice("catching up", KEPT, 0)  # no step: the draft reads what it has missed


def smaller(tree: CandidateTree) -> CandidateTree | None:
    """Return a tree with about a third of the nodes, those most likely to be accepted; None if it would be too small.

    A static tree keeps nodes of its own. A dynamic tree keeps its kind and its depth as far as the nodes reach.
    """
    size = max(-(-tree.size // SHARE), SMALLEST)
    if tree.size < SMALLEST + 2:
        return None
    if isinstance(tree, BestFirstTree):
        return replace(tree, size=size)
    if isinstance(tree, DynamicTree):
        expansions = min(tree.expansions, size - 2)
        return DynamicTree(size, expansions, min(tree.top_k, size - 1))
    likeliest = sorted(tree.choices, key=lambda path: (-_likelihood(path), len(path), path))
    return TreeTopology.from_choices(likeliest[: size - 1])  # a path is never likelier than its prefix


def _likelihood(path: Path) -> float:
    found = 1.0
    for rank in path:
        found *= FIRST_RANK * NEXT_RANK**rank
    return found
