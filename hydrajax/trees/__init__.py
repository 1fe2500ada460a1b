"""Candidate trees: topology and presets."""

from hydrajax.trees import presets
from hydrajax.trees.tree import TreeTopology

__all__ = ["TreeTopology", "presets"]
