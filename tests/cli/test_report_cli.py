"""`hydrajax report`: tables of a directory of results, printed and in Markdown; mistakes end in one line."""

from __future__ import annotations

import re
import sys

import pytest

from hydrajax.bench.report.results import Result, write_result
from hydrajax.files import WholeFile

ROW = {"drafter": "hydra", "head": 0, "top": 1, "accuracy": 0.5}


@pytest.fixture
def folder(tmp_path):
    with WholeFile(tmp_path / "a.json", "--output") as file:
        write_result(file, Result("accuracy", "amphista figure 1", "guesses", [ROW]))
    (tmp_path / "notes.json").write_text("{}")
    return tmp_path


def test_a_report(program, folder):
    done = program("report", folder)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"1 results: {folder / 'REPORT.md'}"
    assert done.out.startswith("guesses\n")
    assert re.search(r"hydra +1 +50\.0%", done.out)
    assert "skipped, not a result: notes.json" in done.err
    assert "| hydra | 1 | 50.0% |" in (folder / "REPORT.md").read_text()


def test_the_output_can_be_elsewhere(program, folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert program("report", folder, "--output", elsewhere / "mine.md").code == 0
    assert [path.name for path in elsewhere.iterdir()] == ["mine.md"]
    assert not (folder / "REPORT.md").exists()


def test_pictures_of_trees_need_matplotlib(program, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = program("tree", "show", "chain-2", "--picture", folder / "tree.png")
    missing = "pictures need matplotlib: pip install 'hydrajax[plots]'"
    assert (done.code, done.err) == (2, f"hydrajax: {missing}\n")
