"""Compare `TreeTopology` with brute force over rank paths, and check its error messages."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.refusals import refusal
from helpers.tree_tools import leaf_paths
from hydrajax.errors import HydrajaxError
from hydrajax.trees.choices import MAX_NODES
from hydrajax.trees.static_tree import TreeTopology


@st.composite
def rank_paths(draw) -> list[tuple[int, ...]]:
    """Draw a prefix-closed set of rank paths in random order. Ranks are drawn freely, so most trees skip some."""
    known = {()}
    for parent, rank in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=24)):
        shallow = sorted(path for path in known if len(path) < 5)
        known.add((*shallow[parent % len(shallow)], rank))
    return draw(st.permutations(sorted(known - {()})))


def brute_nodes(paths) -> list[tuple[int, ...]]:
    """Return the rank path of every node: the root, then one depth after another, each in lexicographic order."""
    nodes = [()]
    for depth in range(1, max(map(len, paths), default=0) + 1):
        nodes += sorted(tuple(path) for path in paths if len(path) == depth)
    return nodes


def is_prefix(short, long) -> bool:
    return long[: len(short)] == short


@given(rank_paths())
def test_arrays_match_brute_force(paths):
    tree = TreeTopology.from_choices(paths)
    nodes = brute_nodes(paths)
    assert [(), *tree.choices] == nodes
    assert tree.size == len(nodes)
    assert tree.depth == max(map(len, nodes))
    assert tree.max_rank == max((rank for path in nodes for rank in path), default=-1)
    assert tree.depths.tolist() == [len(path) for path in nodes]
    assert tree.parents.tolist() == [-1] + [nodes.index(path[:-1]) for path in nodes[1:]]
    assert tree.ancestor_mask.dtype == bool
    assert tree.ancestor_mask.tolist() == [[is_prefix(seen, path) for seen in nodes] for path in nodes]
    assert tree.parents.dtype == tree.depths.dtype == np.int32

    expected = []
    for node, path in enumerate(nodes):
        line = [nodes.index(path[:length]) for length in range(len(path) + 1)]
        expected.append(line + [node] * (tree.depth - len(path)))
    assert tree.node_paths.tolist() == expected
    assert tree.node_paths.dtype == np.int32

    leaves = [n for n, path in enumerate(nodes) if not any(is_prefix(path, other) for other in nodes if other != path)]
    deepest_last_first = sorted(leaves, reverse=True)
    padded = [expected[n][: len(nodes[n]) + 1] + [-1] * (tree.depth - len(nodes[n])) for n in deepest_last_first]
    assert leaf_paths(tree).tolist() == padded

    assert len(tree.levels) == tree.depth
    for depth, level in enumerate(tree.levels, start=1):
        children = [n for n, path in enumerate(nodes) if len(path) == depth]
        parents = sorted({nodes.index(nodes[n][:-1]) for n in children})
        assert level.children.tolist() == children
        assert level.parents.tolist() == parents
        assert level.paths.tolist() == [
            [nodes.index(nodes[p][:length]) for length in range(len(nodes[p]) + 1)] for p in parents
        ]
        assert level.parent_slot.tolist() == [parents.index(nodes.index(nodes[n][:-1])) for n in children]
        assert level.ranks.tolist() == [nodes[n][-1] for n in children]
        assert level.width == 1 + max(nodes[n][-1] for n in children)


@given(rank_paths(), st.randoms(use_true_random=False))
def test_equality_and_hash_do_not_depend_on_the_order_given(paths, rng: random.Random):
    tree = TreeTopology.from_choices(paths)
    _ = tree.levels, tree.ancestor_mask  # cached arrays must not affect equality
    shuffled = [list(path) for path in paths]
    rng.shuffle(shuffled)
    other = TreeTopology.from_choices(shuffled)
    assert tree == other
    assert hash(tree) == hash(other)
    bigger = TreeTopology.from_choices([*paths, next((r,) for r in range(99) if (r,) not in set(paths))])
    assert tree != bigger


def test_numpy_integers_are_ranks_and_become_plain_ints():
    tree = TreeTopology.from_choices([(np.int64(1),), [np.int32(1), np.int8(0)]])
    assert tree == TreeTopology.from_choices([[1], [1, 0]])
    assert all(type(rank) is int for path in tree.choices for rank in path)


def test_bad_choices_are_rejected():
    for choices, *pieces in (
        ([[0], [1], [0]], "[0]", "more than once"),
        ([[0], (0,)], "[0]", "more than once"),
        ([[0], [1, 0]], "[1, 0]", "without its parent", "add [1]"),
        ([[0, 0, 0], [0]], "[0, 0, 0]", "without its parent", "add [0, 0]"),
        ([[0], [-1]], "-1", "integers from 0 up", "[-1]"),
        ([[True]], "True", "integers from 0 up"),
        ([[0], [0, 1.0]], "1.0", "integers from 0 up", "[0, 1.0]"),
        ([[None]], "None", "integers from 0 up"),
        ([["0"]], "'0'", "integers from 0 up"),
        ([[0], []], "non-empty", "[]"),
        ([0], "non-empty list", "0"),
        (["00"], "non-empty list", "'00'"),
    ):
        found = refusal(lambda choices=choices: TreeTopology.from_choices(choices), *pieces)
        assert found.startswith("tree: ")


def test_the_number_of_nodes_is_limited():
    """Mask and paths grow quadratically with the number of nodes. The limit includes the root."""
    TreeTopology.from_choices([[rank] for rank in range(MAX_NODES - 1)])
    with pytest.raises(HydrajaxError, match=f"more than {MAX_NODES} nodes"):
        TreeTopology.from_choices([[rank] for rank in range(MAX_NODES)])
