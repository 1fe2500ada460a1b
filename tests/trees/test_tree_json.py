"""Write and read tree files in every supported way, and reject other content."""

from __future__ import annotations

import json

import pytest

from helpers.refusals import refusal
from hydrajax.trees import DynamicTree, TreeTopology, presets
from hydrajax.trees.tree_json import content_of, read_tree, tree_from

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
