"""Random trees, and the leaf paths of the released code."""

from __future__ import annotations

import numpy as np

from hydrajax.trees.static_tree import TreeTopology


def random_tree(seed: int, n_choices: int, depth: int, widest: int) -> TreeTopology:
    """Return a prefix-closed tree with random ranks, most of which skip some."""
    random = np.random.default_rng(seed)
    known = {()}
    for _ in range(n_choices):
        shallow = sorted(path for path in known if len(path) < depth)
        known.add((*shallow[random.integers(len(shallow))], int(random.integers(widest))))
    return TreeTopology.from_choices(known - {()})


def leaf_paths(tree: TreeTopology) -> np.ndarray:
    """Return int32 ``[leaves, K+1]``: root-to-leaf nodes padded with -1, deepest and last leaf first (released)."""
    node_of = {(): 0} | {path: node for node, path in enumerate(tree.choices, start=1)}
    inner = {path[:-1] for path in tree.choices}
    leaves = [path for path in reversed(((), *tree.choices)) if path not in inner]
    lines = [[node_of[leaf[:length]] for length in range(len(leaf) + 1)] for leaf in leaves]
    return np.array([line + [-1] * (tree.depth + 1 - len(line)) for line in lines], np.int32)
