"""Candidate trees: topologies and presets."""

from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

__all__ = ["DynamicTree", "TreeTopology", "presets"]
