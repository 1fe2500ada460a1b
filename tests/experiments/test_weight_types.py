"""The effects of the types of weights."""

from __future__ import annotations

import json
import sys

import pytest
import weight_types as script


@pytest.mark.slow
def test_each_type_and_draft_has_its_figures(monkeypatch, tmp_path):
    output = tmp_path / "types.json"
    small = ["--types", "float32", "int4", "--draft", "hydra++", "--draft", "lookup", "--texts", "2", "--count", "2"]
    argv = ["weight_types.py", *small, "--text-tokens", "64", "--new-tokens", "24", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    assert script.main() == 0
    plain, int4 = json.loads(output.read_text())["rows"]
    assert (plain["type"], plain["kl"], plain["agreement"]) == ("float32", 0, 1)
    assert plain["perplexity_before"] == plain["perplexity_after"] == int4["perplexity_before"]
    assert int4["kl"] > 0.001
    assert int4["megabytes"] < plain["megabytes"] / 5
    for row in (plain, int4):
        assert row["tokens_per_step"].keys() == {"hydra++", "lookup"}
        assert min(row["tokens_per_step"].values()) > 1
        assert row["differing"] == {"hydra++": 0, "lookup": 0}


def test_another_base_needs_drafts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["weight_types.py", "--base", "smollm2"])
    assert script.main() == 2
    assert "--draft: got none, expected drafts for this base" in capsys.readouterr().err
