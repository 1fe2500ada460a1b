"""Names, shapes and error messages of dynamic trees."""

from __future__ import annotations

import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.dynamic import guesses_of, static


def test_a_name_and_its_tree():
    tree = presets.by_name("dynamic-60-7-10")
    assert tree == presets.tree_of("dynamic-60-7-10") == presets.tree_of(tree) == DynamicTree(60, 7, 10)
    assert tree.name == "dynamic-60-7-10"
    assert hash(tree) == hash(DynamicTree(60, 7, 10))
    assert (tree.size, tree.depth) == (60, 8)
    assert DynamicTree(3, 7, 10).depth == 2  # limited by the two nodes below the root
    assert guesses_of(DynamicTree(20, 2, 5)) == [(1, 5), (5, 5), (5, 5)]
    assert guesses_of(presets.cartesian([3, 2])) == [(1, 3), (3, 2)]


def test_as_many_nodes_as_there_are_candidates():
    assert DynamicTree(4 + 2 * 16 + 1, 2, 4).size == 37
    with pytest.raises(HydrajaxError, match=r"dynamic-38-2-4 has 36 candidates .* too few for 37 nodes"):
        DynamicTree(38, 2, 4)


def test_invalid_numbers_are_rejected():
    for name, message in (
        ("dynamic-1-2-3", "tree: got a dynamic tree of 1 nodes, expected 2 to 4096, root included"),
        ("dynamic-9999-2-100", "tree: got a dynamic tree of 9999 nodes, expected 2 to 4096, root included"),
        ("dynamic-8-2-0", "tree: got 2 expansions of 0 nodes, expected at least 0 of at least 1 node"),
        ("dynamic-8-2", "tree: got 'dynamic-8-2', expected root, chain-K"),
        ("dynamic-8--2-3", "tree: got 'dynamic-8--2-3', expected root, chain-K"),
    ):
        with pytest.raises(HydrajaxError, match=message):
            presets.by_name(name)


def test_static_rejects_dynamic_trees():
    assert static(presets.chain(2), "drawing") == presets.chain(2)
    with pytest.raises(HydrajaxError, match="tree: got dynamic-8-2-3, expected a static tree for drawing"):
        static(DynamicTree(8, 2, 3), "drawing")


def test_the_static_tree_of_eagle():
    tree = presets.by_name("eagle_26")
    assert (tree.size, tree.depth, tree.max_rank) == (26, 5, 3)
