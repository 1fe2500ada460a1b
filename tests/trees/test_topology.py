"""Compare trees built on the device with loops over parents and with the arrays of static trees."""

from functools import partial

import jax
import numpy as np
import pytest

from helpers.tree_tools import random_tree
from hydrajax.trees import presets
from hydrajax.trees.built_trees import from_parents, with_chain

DEPTH, MOST_CHILDREN = 4, 6
made = jax.jit(partial(from_parents, depth=DEPTH, most_children=MOST_CHILDREN))


def random_parents(seed: int, n_nodes: int) -> np.ndarray:
    """Return the parents of one random tree. They precede their children; a few nodes have none."""
    random = np.random.default_rng(seed)
    parents, depths = [-1], [0]
    for _ in range(1, n_nodes):
        allowed = [n for n, d in enumerate(depths) if d < DEPTH and parents.count(n) < MOST_CHILDREN]
        parent = -1 if random.random() < 0.15 else int(random.choice(allowed))
        parents.append(parent)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return np.array(parents, np.int32)


def line_to(parents, node: int) -> list[int]:
    """Return the path to this node from the root or from an ancestor without a parent."""
    line = [node]
    while parents[line[0]] >= 0:
        line.insert(0, int(parents[line[0]]))
    return line


def check_arrays(found, row: int, parents: list[int]) -> None:
    """Compare the arrays of one tree of a batch with loops over its parents."""
    for node, parent in enumerate(parents):
        line = line_to(parents, node)
        assert found.depths[row, node] == len(line) - 1
        assert np.flatnonzero(found.mask[row, node]).tolist() == sorted(line)
        assert found.paths[row, node].tolist() == line + [node] * (found.depth + 1 - len(line))
        children = [child for child, above in enumerate(parents) if above == node]
        assert found.children[row, node].tolist() == children + [-1] * (found.children.shape[2] - len(children))
        assert parent < 0 or found.inner[row, found.parent_slot[row, node]] == parent


@pytest.mark.parametrize("n_nodes", [1, 2, 13])
def test_trees_of_parents_match_a_loop(n_nodes):
    """Build a batch of random trees of equal size and different shapes."""
    parents = np.stack([random_parents(seed, n_nodes) for seed in range(40)])
    found = jax.device_get(made(parents))
    assert (found.size, found.depth, found.children.shape[2]) == (n_nodes, DEPTH, MOST_CHILDREN)
    np.testing.assert_array_equal(found.parents, parents)
    for row, mine in enumerate(parents):
        check_arrays(found, row, mine.tolist())


@pytest.mark.parametrize("shared", [True, False])
def test_a_chain_below_any_node_is_a_tree_of_these_parents(shared):
    """Append chains at every node, to one tree shared by the batch (NumPy constants) and to one tree per sequence."""
    length, tree = 3, random_tree(1, 14, depth=DEPTH, widest=4)
    batch = tree.size
    if shared:
        parents, found = np.stack([tree.parents] * batch), tree.topology
    else:
        parents = np.stack([random_parents(seed, tree.size) for seed in range(batch)])
        found = jax.device_get(made(parents))
    at = np.arange(batch, dtype=np.int32)
    longer = jax.device_get(jax.jit(partial(with_chain, length=length))(found, at))
    assert (longer.size, longer.depth) == (tree.size + length, found.depth + length)
    for row in range(batch):
        mine = [*parents[row], row, *range(tree.size, tree.size + length - 1)]
        assert longer.parents[row].tolist() == mine
        check_arrays(longer, row, mine)


def test_static_arrays_are_constants_of_the_host():
    """XLA folds only arrays that are NumPy during tracing."""
    assert all(isinstance(array, np.ndarray) for array in presets.sparse().topology)
