"""`hydrajax bench`: fields and figures that hold on any machine; and `hydrajax report`. No timing asserts."""

import json
import re
import sys

import pytest

from helpers.report_examples import write_to
from hydrajax.bench.report.results import Result

FAST = ("--repeats", "1", "--context", "128")


@pytest.mark.slow
def test_random_shape_reports_every_phase_at_the_size_and_batch(program):
    result = program(*("bench", "--random", "tiny", "--tree-sizes", "5", "--batch-sizes", "2", "--json", *FAST))
    report = json.loads(result.out)
    assert [(row["batch"], row["nodes"]) for row in report["rows"]] == [(2, 5)]
    for row in report["rows"]:
        for phase in ("autoregressive_step", "step", "propose", "verify", "accept_commit", "observe", "prefill"):
            assert row[phase] > 0, phase
        assert row["compile_seconds"] > 0
        assert row["peak_memory_bytes"] > 0
        assert row["break_even"] == pytest.approx(row["step"] / row["autoregressive_step"])
        parts = row["propose"] + row["accept_commit"] + row["observe"]
        assert row["draft_overhead"] == pytest.approx(parts / row["verify"])
        assert row["tokens_per_second"] is None  # not measured on random weights
    # Weights without the embedding table, and keys and values of 128 + 1 slots of 2 rows in 3 layers of 4 heads of 16.
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 64 + 64 * 512
    assert report["rows"][0]["autoregressive_bytes_per_step"] == 4 * (weights + 2 * 3 * 2 * 4 * 129 * 16)


def test_a_draft_reports_rates_both_ways_and_equal_outputs(program, base, heads, tmp_path):
    file = tmp_path / "bench.json"
    result = program(
        *("bench", "--base", base, "--draft", heads, "--tree", "cartesian-2x2", "--max-new-tokens", "8"),
        *("--json", file, *FAST),
    )
    (row,) = json.loads(file.read_text())["rows"]
    assert row["outputs_equal"] is True
    assert 1 <= row["tokens_per_step"] <= 3
    assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["autoregressive_tokens_per_second"])
    assert "cartesian-2x2" in result.out
    assert "…" not in result.out  # no figure is cut off


ROW = {"drafter": "hydra", "head": 0, "top": 1, "accuracy": 0.5}


@pytest.fixture
def folder(tmp_path):
    write_to(tmp_path / "a.json", Result("accuracy", "amphista figure 1", "guesses", [ROW]))
    (tmp_path / "notes.json").write_text("{}")
    return tmp_path


def test_a_report(program, folder):
    done = program("report", folder)
    assert done.out.splitlines()[-1] == f"1 results: {folder / 'REPORT.md'}"
    assert done.out.startswith("guesses\n")
    assert re.search(r"hydra +1 +50\.0%", done.out)
    assert "skipped, not a result: notes.json" in done.err
    assert "| hydra | 1 | 50.0% |" in (folder / "REPORT.md").read_text()


def test_the_output_can_be_elsewhere(program, folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    program("report", folder, "--output", elsewhere / "mine.md")
    assert [path.name for path in elsewhere.iterdir()] == ["mine.md"]
    assert not (folder / "REPORT.md").exists()


def test_pictures_of_trees_need_matplotlib(refused, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    missing = "hydrajax: pictures need matplotlib: pip install 'hydrajax[plots]'\n"
    refused(missing, "tree", "show", "chain-2", "--picture", folder / "tree.png")
