"""Trees by name, compared with counts and digests from the repositories that released them, and tree files."""

import hashlib
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.refusals import assert_refused, refusal
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.dynamic import guesses_of, static
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.tree_json import content_of, read_tree, tree_from

# name: (choices at depth 1, 2, ..., SHA-256 of the sorted list as JSON, first 16 digits), computed from the files
# themselves: medusa/model/medusa_choices.py of FasterDecoding/Medusa e2a5d20; hydra/model/hydra_choices.py of
# zankner/Hydra 3f39fbd has the first one, with the same digest.
RELEASED = {
    "mc_sim_7b_63": ([10, 28, 23, 2], "777efe164d32b799"),
    "vicuna_7b_stage2": ([10, 23, 23, 7], "ac1b77303fb35bfe"),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], "c0ad9c4459cba7ed"),
    "vicuna_7b_stage1": ([10, 32, 20, 1], "ecdc8d5a1e009750"),
    "vicuna_13b_stage2": ([10, 19, 25, 9], "21804df78d8f02a9"),
    "vicuna_13b_stage1": ([10, 29, 23, 1], "d1d95d4668711fce"),
    "vicuna_33b_stage2": ([10, 24, 24, 5], "96f759f0995eb562"),
    "vicuna_33b_stage1": ([10, 34, 19], "18445a6c83d3743f"),
    "zephyr_stage2": ([10, 27, 23, 3], "e23502832aa1a146"),
}


def sizes_by_depth(tree: TreeTopology) -> list[int]:
    counts = Counter(len(path) for path in tree.choices)
    return [counts[depth] for depth in range(1, max(counts, default=0) + 1)]


def test_sparse_trees_are_the_released_ones():
    for name, (sizes, digest) in RELEASED.items():
        tree = presets.sparse(name)
        assert presets.by_name(name) == tree
        assert tree.size == 64
        assert sizes_by_depth(tree) == sizes
        in_order = sorted(map(list, tree.choices), key=lambda path: (len(path), path))
        assert hashlib.sha256(json.dumps(in_order).encode()).hexdigest()[:16] == digest
    assert set(RELEASED) <= set(presets.names())
    assert presets.sparse() == presets.sparse("mc_sim_7b_63")


@given(st.lists(st.integers(1, 4), max_size=4))
def test_cartesian_has_every_combination(widths):
    tree = presets.cartesian(widths)
    assert len(tree.choices) == sum(math.prod(widths[:depth]) for depth in range(1, len(widths) + 1))
    combinations = {
        path
        for depth in range(1, len(widths) + 1)
        for path in itertools.product(range(4), repeat=depth)
        if all(rank < width for rank, width in zip(path, widths, strict=False))
    }
    assert set(tree.choices) == combinations


def test_by_name_of_every_kind(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("[[1], [1, 2]]")
    assert presets.by_name("root").choices == ()
    eagle = presets.by_name("eagle_26")
    assert (eagle.size, eagle.depth, eagle.max_rank) == (26, 5, 3)
    assert presets.by_name("chain-3").choices == ((0,), (0, 0), (0, 0, 0))
    assert presets.by_name("cartesian-2x1").choices == ((0,), (1,), (0, 0), (1, 0))
    assert presets.by_name("cartesian-3").choices == ((0,), (1,), (2,))
    assert presets.by_name(str(path)).choices == ((1,), (1, 2))


def test_by_name_parses_inline_choices(tmp_path):
    """Inline choices give the same tree as a file with the same text."""
    for text in ("[[0],[0,0],[1]]", " [[1], [1, 2], [0]]\n", "[]", json.dumps(presets.sparse().choices)):
        path = tmp_path / "[tree].json"  # a file name that starts like JSON
        path.write_text(text)
        assert presets.by_name(text) == presets.by_name(str(path)) == TreeTopology.from_choices(json.loads(text))
    assert presets.by_name("[[0],[0,0],[1]]").choices == ((0,), (1,), (0, 0))


def test_bad_inline_choices_are_rejected():
    for text, message in (
        ("[[0],[0,0]", "tree: got '[[0],[0,0]', expected a JSON list of choices such as [[0], [0, 0], [1]]: "),
        ("[[0]] and more", "tree: got '[[0]] and more', expected a JSON list"),
        ("[" * 100_000, "tree: got '" + "[" * 57 + "...', expected a JSON list"),
        ("[0, 1]", "tree: got the choice 0"),
        ("[[0, 0]]", "tree: got the choice [0, 0] without its parent: add [0]"),
    ):
        found = refusal(lambda text=text: presets.by_name(text))
        assert found.startswith(message)
        assert len(found) < 300


def test_labels_are_short_and_valid_in_file_names():
    assert [presets.label(name) for name in ("chain-3", "trees/mine.json", "[[0],[0,0],[1]]")] == [
        "chain-3", "mine", "4-nodes",
    ]  # fmt: skip


def test_by_name_lists_the_allowed_names():
    for name in (
        "", "chain", "chain-", "chain--1", "chain-4 ", "cartesian-", "cartesian-2x", "cartesian-x2", "mc_sim_7",
    ):  # fmt: skip
        allowed = ("root", "chain-K", "cartesian-S1xS2x...", *RELEASED, ".json")
        refusal(lambda name=name: presets.by_name(name), f"got '{name}'", *allowed)
    refusal(lambda: presets.sparse("mc_sim_8b"), "mc_sim_8b", "mc_sim_7b_63")


def test_impossible_sizes_are_rejected(tmp_path):
    assert_refused(
        presets.by_name,
        ("cartesian-2x0", "got Cartesian widths [2, 0], expected 1 or more"),
        ("cartesian-999x999x999", "root included"),  # rejected before a billion paths are listed
        (str(tmp_path / "absent.json"), "no such file"),
    )
    refusal(lambda: presets.chain(-1), "got a chain of -1, expected a depth of 0 or more")


def test_a_name_and_its_dynamic_tree():
    tree = presets.by_name("dynamic-60-7-10")
    assert tree == presets.tree_of("dynamic-60-7-10") == presets.tree_of(tree) == DynamicTree(60, 7, 10)
    assert tree.name == "dynamic-60-7-10"
    assert hash(tree) == hash(DynamicTree(60, 7, 10))
    assert (tree.size, tree.depth) == (60, 8)
    assert DynamicTree(3, 7, 10).depth == 2  # limited by the two nodes below the root
    assert DynamicTree(4 + 2 * 16 + 1, 2, 4).size == 37  # as many nodes as there are candidates
    assert guesses_of(DynamicTree(20, 2, 5)) == [(1, 5), (5, 5), (5, 5)]
    assert guesses_of(presets.cartesian([3, 2])) == [(1, 3), (3, 2)]
    assert static(presets.chain(2), "drawing") == presets.chain(2)
    refusal(lambda: static(tree, "drawing"), "tree: got dynamic-60-7-10, expected a static tree for drawing")


def test_invalid_dynamic_trees_are_rejected():
    assert_refused(
        presets.by_name,
        ("dynamic-1-2-3", "tree: got a dynamic tree of 1 nodes, expected 2 to 4096, root included"),
        ("dynamic-9999-2-100", "tree: got a dynamic tree of 9999 nodes, expected 2 to 4096, root included"),
        ("dynamic-38-2-4", "dynamic-38-2-4 has 36 candidates ... too few for 37 nodes"),
        ("dynamic-8-2-0", "tree: got 2 expansions of 0 nodes, expected at least 0 of at least 1 node"),
        ("dynamic-8-2", "tree: got 'dynamic-8-2', expected root, chain-K"),
        ("dynamic-8--2-3", "tree: got 'dynamic-8--2-3', expected root, chain-K"),
    )


NUMBERS = {"nodes": 60, "expansions": 7, "top_k": 10}


@pytest.mark.parametrize("tree", [presets.sparse(), presets.root(), DynamicTree(60, 7, 10)], ids=lambda tree: tree.size)
def test_round_trip(tmp_path, tree):
    path = presets.searched_path(tmp_path, 2)
    path.write_text(json.dumps(content_of(tree) | {"provenance": {"machine": "abacus"}}))
    assert read_tree(path) == presets.by_name(str(path)) == presets.tree_of(path) == tree
    assert presets.searched(tmp_path, 2) == tree


def test_the_fields_of_a_file():
    assert content_of(DynamicTree(60, 7, 10)) == {"dynamic": NUMBERS}
    assert content_of(presets.chain(2)) == {"choices": [[0], [0, 0]]}
    assert tree_from([[0], [0, 0]], "here") == presets.chain(2)


def test_a_file_has_a_list_or_an_object(tmp_path):
    choices = [[1], [1, 2], [4], [1, 2, 0], [4, 3]]
    path = tmp_path / "tree.json"
    for content in (choices, {"choices": choices, "note": "searched"}):
        path.write_text(json.dumps(content))
        assert read_tree(path) == read_tree(str(path)) == TreeTopology.from_choices(choices)


def test_other_content_is_rejected():
    for content, message in (
        ("chain-4", "t.json: expected a JSON list of choices such as [[0], [0, 0], [1]], or an object with such"),
        ({"tree": [[0]]}, "t.json: expected a JSON list of choices"),
        ({"choices": {"0": 1}}, "t.json: expected a JSON list of choices"),
        ({"dynamic": NUMBERS, "choices": [[0]]}, "t.json: got choices and dynamic, expected one of them"),
        ({"dynamic": None}, "t.json: dynamic: expected the fields nodes, expansions, top_k and no other"),
        ({"dynamic": [60, 7, 10]}, "t.json: dynamic: expected the fields nodes, expansions, top_k"),
        ({"dynamic": {"nodes": 60, "expansions": 7}}, "t.json: dynamic: expected the fields"),
        ({"dynamic": NUMBERS | {"depth": 3}}, "t.json: dynamic: expected the fields"),
        ({"dynamic": NUMBERS | {"top_k": "10"}}, "t.json: dynamic.top_k: got '10', expected an integer"),
        ({"dynamic": NUMBERS | {"nodes": True}}, "t.json: dynamic.nodes: got 'True', expected an integer"),
        ({"dynamic": NUMBERS | {"nodes": 6.0}}, "t.json: dynamic.nodes: got '6.0', expected an integer"),
        ({"dynamic": NUMBERS | {"nodes": 1}}, "got a dynamic tree of 1 nodes, expected 2 to 4096"),
        ({"dynamic": NUMBERS | {"nodes": 10**30}}, "00 nodes, expected 2 to 4096"),
        ({"dynamic": NUMBERS | {"expansions": -1}}, "got -1 expansions of 10 nodes, expected at least 0"),
        ({"dynamic": NUMBERS | {"top_k": 1}}, "dynamic-60-7-1 has 8 candidates"),
    ):
        assert refusal(lambda content=content: tree_from(content, "t.json"), message).startswith("tree: ")


def test_a_file_that_is_no_tree_is_named(tmp_path):
    path = tmp_path / "tree.json"
    for content in (b"[[0], [0,", b"", b"\xff\xfe[[0]]", b"[" * 100_000):
        path.write_bytes(content)
        assert refusal(lambda: read_tree(path)).startswith(f"tree: {path} is not a JSON tree file: ")
    for content, message in (
        ([[0], [1, 0]], "without its parent"),
        ([[True]], "integers from 0 up"),
        (7, "expected a JSON list of choices"),
        (None, "expected a JSON list of choices"),
    ):
        path.write_text(json.dumps(content))
        refusal(lambda: read_tree(path), message, str(path))
    refusal(lambda: read_tree(tmp_path / "absent.json"), "no such file: ", "absent.json")
    refusal(lambda: read_tree(tmp_path), "is not a JSON tree file")
