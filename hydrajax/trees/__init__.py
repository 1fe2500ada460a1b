"""Candidate trees: topologies and presets."""

from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology

__all__ = ["BestFirstTree", "DynamicTree", "TreeTopology", "presets"]
