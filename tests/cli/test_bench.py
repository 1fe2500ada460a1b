"""`hydrajax bench`: fields, figures that hold on any machine, and errors. No timing asserts."""

from __future__ import annotations

import json

import pytest

FAST = ("--repeats", "1", "--context", "128")


def report_of(result) -> dict:
    assert result.code == 0, result
    return json.loads(result.out)


@pytest.mark.slow
def test_random_shape_reports_every_phase_at_the_size_and_batch(program):
    result = program(*("bench", "--random", "tiny", "--tree-sizes", "5", "--batch-sizes", "2", "--json", *FAST))
    report = report_of(result)
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
    assert result.code == 0, result
    (row,) = json.loads(file.read_text())["rows"]
    assert row["outputs_equal"] is True
    assert 1 <= row["tokens_per_step"] <= 3
    assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["autoregressive_tokens_per_second"])
    assert "cartesian-2x2" in result.out
    assert "…" not in result.out  # no figure is cut off


@pytest.mark.slow
def test_settings_of_a_draft_are_compared(program, base, tmp_path):
    file = tmp_path / "bench.json"
    settings = ["--draft", "lookahead", "--draft-settings", "3-3-2,2-2-4", "--max-new-tokens", "8", "--json", file]
    result = program("bench", "--base", base, *settings, *FAST)
    assert result.code == 0, result
    content = json.loads(file.read_text())
    rows = [(row["tree"], row["nodes"], row["depth"], row["outputs_equal"]) for row in content["rows"]]
    # The root and (N - 1) * G candidates, and (N - 1) * W - 1 nodes of the window.
    assert rows == [("lookahead-3-3-2", 1 + 4 + 5, 2, True), ("lookahead-2-2-4", 1 + 4 + 1, 1, True)]
    assert content["arguments"]["draft"] == "lookahead"
    assert all(row["observe"] > 0 for row in content["rows"])
