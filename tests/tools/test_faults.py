"""`python -m tools.faults`: its counts, and faults in files, settings and training runs with one seed."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re

import pytest

from helpers.scripts import ROOT, TOOLS


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def faults(monkeypatch):
    """The faults by name, to add one to."""
    from tools.faults.registry import FAULTS

    monkeypatch.setattr("tools.faults.registry.FAULTS", known := dict(FAULTS))
    return known


def main(*argv: object) -> int:
    return importlib.import_module("tools.faults.__main__").main([str(word) for word in argv])


def test_failures_are_counted_with_the_first_seed(faults, tmp_path):
    from tools.faults import registry

    def fails(trial):
        number = trial.random.random()
        if len(drawn) in (2, 3):
            drawn.append(number)
            raise registry.Failure("it failed")
        if len(drawn) == 5:
            raise ZeroDivisionError("a bug of the fault")
        drawn.append(number)
        return 10

    def lacks(trial):
        raise registry.Unsupported("no disk")

    drawn: list[float] = []
    faults["fails"], faults["lacks"] = registry.Fault(fails, 6), registry.Fault(lacks, 1)
    found = registry.run("fails", range(7, 13), 60, 60, tmp_path, {})
    assert (found.trials, found.failures, found.first_seed, found.message) == (33, 3, 9, "it failed")
    drawn, before = [], drawn
    registry.run("fails", range(9, 10), 60, 60, tmp_path, {})
    assert drawn == before[2:3]  # a seed reproduces its trial
    found = registry.run("lacks", range(3), 60, 60, tmp_path, {})
    assert (found.trials, found.failures, found.message) == (0, 0, "not tried: no disk")


@pytest.mark.slow
def test_settings_and_command_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = ["--only", "train-settings", "--only", "command-lines", "--seeds", "1", "--folder", tmp_path]
    assert main(*only) == 0
    assert "train-settings: 17 trials, 0 failures." in capsys.readouterr().err
    assert main("--only", "wind") == 2
    assert list(tmp_path.iterdir()) == []


def test_every_fault_is_described():
    """In the page of the tool."""
    importlib.import_module("tools.faults.__main__")
    from tools.faults.registry import FAULTS

    listed = re.findall(r"^\| `([\w-]+)` \|", (TOOLS / "faults" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(FAULTS)


@pytest.mark.slow
def test_downloaded_files_and_training(tmp_path, capsys):
    trials = {
        "shard-indexes": 20, "safetensors-headers": 29, "stdin": 8, "serve-options": 20, "serve-requests": 22,
        "serve-connections": 60, "call-arguments": 12, "train-process-loss": 1, "train-diverges": 1,
    }  # fmt: skip
    for name, count in trials.items():
        assert main("--only", name, "--seeds", "1", "--folder", tmp_path) == 0
        assert f"{name}: {count} trials, 0 failures." in capsys.readouterr().err
    assert main("--only", "report-values", "--seeds", "3", "--folder", tmp_path) == 0
    assert "report-values: 3 trials, 0 failures." in capsys.readouterr().err


@pytest.mark.slow
def test_faults_that_need_root(tmp_path, capsys):
    for name in ("train-power-cut", "train-network"):
        assert main("--only", name, "--seeds", "1", "--folder", tmp_path) == 0
        err = capsys.readouterr().err
        assert "not tried: " in err or " trials, 0 failures." in err


@pytest.mark.slow
def test_limits_of_a_command(tmp_path, monkeypatch):
    """Its exit code and stderr are returned; too long a run is a failure."""
    from tools.faults import commands, registry

    monkeypatch.setattr(commands, "CONTEXT", multiprocessing.get_context("spawn"))  # nothing is imported before
    code, err = commands.run_limited(["report", tmp_path / "none"], 4 << 30, 60, tmp_path)
    assert code == 2
    assert err.startswith("hydrajax: report: ")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(registry.Failure, match=r"^did not end within 0\.5 seconds$"):
        commands.run_limited(["train", "--config", tmp_path / "pipe"], 4 << 30, 0.5, tmp_path)
