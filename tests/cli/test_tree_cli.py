"""`hydrajax tree`: search, saved trees, predicted against measured figures, and drawings."""

import dataclasses
import json
import os
import re
import shutil

import numpy as np
import pytest

import hydrajax
from helpers.outputs import write_lines
from hydrajax.bench.calibration import Calibration
from hydrajax.bench.contests import tree_search
from hydrajax.bench.report.outputs import find_results
from hydrajax.locking import in_use
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.tree_json import read_tree

TEXTS = ["def read(path):\n", "import os\n\nclass Reader:\n    def __init__(self, ", "for name in sorted("]


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])


def check_search(rows: list[dict], sizes: list[int]) -> dict:
    """Check a search that measured the prompts it was calibrated on, and return the fastest row."""
    assert [row["nodes"] for row in rows] == sizes
    for row in rows:
        assert row["tokens_per_step"] == pytest.approx(row["expected_tokens_per_step"])
        assert row["equal"] is True
    if rows[0]["low"] is not None:
        assert all(row["low"] <= row["tokens_per_second"] <= row["high"] for row in rows)
        assert sum(row["chance_best"] for row in rows) == pytest.approx(1)
    return max(rows, key=lambda row: row["tokens_per_second"])


def test_a_search_writes_the_fastest_tree(program, refused, base, heads, prompts, tmp_path):
    """Saved with the heads, where `generate` finds it."""
    heads = shutil.copytree(heads, tmp_path / "heads")
    model = ["--base", base, "--draft", heads]
    search = ["--prompts", prompts, "--shapes", "static", "--sizes", "2", "--largest", 4, "--repeats", 1]
    search += ["--max-new-tokens", 12]
    done = program("tree", "search", *model, *search, "--save", "--save-slower", "--picture", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "chance it is" in done.out
    content = json.loads((heads / "tree_b1.json").read_text())
    row = check_search(content["provenance"]["measured"], [2])
    assert (row["low"], row["high"], row["chance_best"]) == (None, None, None)  # one round gives no interval
    loaded = hydrajax.load(base, heads)
    assert loaded.default_tree() == read_tree(heads / "tree_b1.json")
    assert loaded.default_tree().size == 2
    with in_use(heads / "tree_b1.json"):
        message = f"--save: {heads / 'tree_b1.json'} is in use by process {os.getpid()} on "
        refused(message, "tree", "search", *model, *search, "--save")


def test_a_tree_slower_than_none_is_not_saved(program, base, heads, prompts, tmp_path, monkeypatch):
    heads = shutil.copytree(heads, tmp_path / "heads")
    really = tree_search.contest

    def slow(*given, **settings):
        return [dataclasses.replace(row, speedup=0.83) for row in really(*given, **settings)]

    monkeypatch.setattr(tree_search, "contest", slow)
    flags = ["--prompts", prompts, "--sizes", "2", "--repeats", 2, "--max-new-tokens", 12, "--save"]
    done = program("tree", "search", "--base", base, "--draft", heads, "--shapes", "static", *flags, code=2)
    assert "--save: not saved: the fastest tree, the tree of 2 nodes, has 0.83 times the speed without" in done.err
    assert "0.83x" in done.out
    assert not (heads / "tree_b1.json").exists()


def test_a_draft_that_is_never_right_gets_no_tree(refused, base, prompts, tmp_path, monkeypatch):
    never = Calibration(np.full((2, 1, 8), 99, np.int32), ((0, 2, 6),))
    monkeypatch.setattr("hydrajax.bench.calibration.calibrate", lambda *given, **settings: never)
    flags = ["--draft", "lookup", "--prompts", prompts, "--sizes", "4", "--output", tmp_path / "tree.json"]
    message = "--sizes: got 4, expected at most 1: the draft is right too rarely"
    refused(message, "tree", "search", "--base", base, *flags)
    assert not (tmp_path / "tree.json").exists()


@pytest.mark.slow
def test_a_dynamic_tree_is_searched_saved_and_taken(program, base, heads, prompts, tmp_path, monkeypatch):
    """The dynamic tree is made faster than the static one, as random heads show no difference."""
    heads = shutil.copytree(heads, tmp_path / "heads")
    really = tree_search.contest

    def quicker(executors, prompts, **settings):
        rows = really(executors, prompts, **settings)
        return [
            dataclasses.replace(row, tokens_per_second=1e6 + row.nodes, speedup=1.2)
            if isinstance(executors[row.name].program.tree, DynamicTree)
            else row
            for row in rows
        ]

    monkeypatch.setattr(tree_search, "contest", quicker)
    model = ["--base", base, "--draft", heads]
    flags = ["--prompts", prompts, "--sizes", "2,3", "--largest", 3, "--repeats", 1, "--max-new-tokens", 6]
    done = program("tree", "search", *model, *flags, "--save", "--picture", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((heads / "tree_b1.json").read_text())
    names = [row["name"] for row in content["provenance"]["measured"]]
    taken = DynamicTree(3, 1, 2)
    assert content["dynamic"] == {"nodes": 3, "expansions": 1, "top_k": 2}
    assert names[-2:] == ["dynamic-2-0-1", taken.name]
    assert all(row["equal"] for row in content["provenance"]["measured"])
    assert f"saved {taken.name} to {heads / 'tree_b1.json'}" in done.out
    ((_, result),), _ = find_results(heads)
    assert {row["family"] for row in result.rows} >= {"searched", "dynamic"}
    assert hydrajax.load(base, heads).default_tree() == taken
    assert presets.by_name(str(heads / "tree_b1.json")) == taken  # what --tree makes of it


def test_show(program, refused, tmp_path):
    done = program("tree", "show", "cartesian-2x2", "--picture", tmp_path / "tree.png")
    assert done.out.splitlines() == [
        "root (7 nodes, depth 2)", "├── 0", "│   ├── 0", "│   └── 1", "└── 1", "    ├── 0", "    └── 1",
    ]  # fmt: skip
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert program("tree", "show", "root").out == "root (1 nodes, depth 0)\n"
    refused("--picture: cannot write", "tree", "show", "root", "--picture", tmp_path / "no" / "tree.png")


def test_show_a_step(program, base, heads, tmp_path):
    """A dynamic tree with its tokens, accepted ones ticked, and the number of emitted tokens."""
    step = ["--base", base, "--draft", heads, "--prompt", "for", "--step", 2, "--picture", tmp_path / "step.png"]
    done = program("tree", "show", "dynamic-6-1-3", *step)
    first, root, *lines = done.out.splitlines()
    assert first.startswith("step 2, after 'for")
    assert root.endswith(" ✓  root, chosen by the base")
    nodes = [line for line in lines if "── " in line]
    assert len(nodes) == 5
    assert all("%" in line for line in nodes)
    count = int(re.search(r"One pass of the base over 6 nodes emits (\d) token", done.out)[1])
    assert done.out.count("✓") == count
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_large_trees_hide_most_rejected_nodes(program, base, heads, wide_tree):
    """66 nodes and the root: three rejected children and a count of the others, unless all are requested."""
    step = ["tree", "show", wide_tree, "--base", base, "--draft", heads, "--prompt", "for"]
    short, whole = (program(*step, *more).out for more in ([], ["--all"]))
    assert len(short.splitlines()) < 15
    hidden = sum(map(int, re.findall(r"and (\d+) more", short)))
    shown = len([line for line in short.splitlines() if "── " in line and " more" not in line])
    assert hidden + shown == 66
    assert "more" not in whole
    assert whole.count("── ") == 66
