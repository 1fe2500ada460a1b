"""Smaller trees for larger batches: the nodes of a tree that are most likely to be accepted."""

import math
from dataclasses import replace

from hydrajax.trees.choices import Choice
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree
from hydrajax.trees.presets import chain
from hydrajax.trees.static_tree import TreeTopology

# Assumed acceptance of a guess of rank 0, and its factor for each further rank. Only the order of paths depends on it.
FIRST_RANK, NEXT_RANK = 0.6, 0.3
# Nodes from which a tree is worth growing: choosing the candidates of each level takes time.
WORTH_GROWING = 6


def with_size(tree: CandidateTree, size: int) -> CandidateTree:
    """Return a tree with at most ``size`` nodes, at least 2.

    A static tree keeps the nodes that are most likely to be accepted. A dynamic tree keeps its kind; with few nodes it
    becomes a chain, at most as deep as it was.
    """
    size = max(size, 2)
    if tree.size <= size:
        return tree
    if isinstance(tree, BestFirstTree):
        return replace(tree, size=size)
    if isinstance(tree, DynamicTree):
        if size < WORTH_GROWING:
            return chain(min(size - 1, tree.expansions + 1))
        return DynamicTree(size, min(tree.expansions, size - 2), min(tree.top_k, size - 1))
    likeliest = sorted(tree.choices, key=lambda path: (-_likelihood(path), len(path), path))
    return TreeTopology.from_choices(likeliest[: size - 1])  # no path is likelier than its prefix


def _likelihood(path: Choice) -> float:
    return math.prod(FIRST_RANK * NEXT_RANK**rank for rank in path)
