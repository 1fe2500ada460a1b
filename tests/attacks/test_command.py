"""`experiments/attack.py`: what it counts, and attacks on files, settings and training runs, tried with a seed."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from helpers.scripts import EXPERIMENTS, module


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)


@pytest.fixture
def attacks(monkeypatch):
    """The attacks by name, to add one to."""
    from attacks.registry import ATTACKS

    monkeypatch.setattr("attacks.registry.ATTACKS", known := dict(ATTACKS))
    return known


def test_what_an_attack_finds_is_counted_with_its_first_seed(attacks, tmp_path):
    from attacks import registry

    def falls(place):
        number = place.random.random()
        if len(drawn) in (2, 3):
            drawn.append(number)
            raise registry.Fell("it gave way")
        if len(drawn) == 5:
            raise ZeroDivisionError("a bug of the attack")
        drawn.append(number)
        return 10

    def lacks(place):
        raise registry.CannotTry("no disk")

    drawn: list[float] = []
    attacks["it falls"], attacks["it lacks"] = registry.Attack(falls, 6), registry.Attack(lacks, 1)
    found = registry.run("it falls", range(7, 13), 60, 60, tmp_path, {})
    assert (found.tried, found.failed, found.first, found.said) == (33, 3, 9, "it gave way")
    drawn, before = [], drawn
    registry.run("it falls", range(9, 10), 60, 60, tmp_path, {})
    assert drawn == before[2:3]  # a seed is the same attack again
    found = registry.run("it lacks", range(3), 60, 60, tmp_path, {})
    assert (found.tried, found.failed, found.said) == (0, 0, "not tried: no disk")


def test_attacks_by_settings_and_command_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = module(EXPERIMENTS / "attack.py")
    only = ["--only", "training settings", "--only", "command lines", "--seeds", "1", "--folder", str(tmp_path)]
    assert script.main(only) == 0
    assert "training settings: 17 tried, 0 failed." in capsys.readouterr().err
    assert script.main(["--only", "wind"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("indexes of shards", 20),
        ("headers of safetensors", 29),
        ("PyTorch files", 49),
        ("standard input", 8),
        ("results that somebody else wrote", 3),
        ("one of two processes is killed", 1),
        ("training that diverges", 1),
    ],
)
def test_attacks_by_what_is_downloaded_and_by_what_training_meets(tmp_path, capsys, name, count):
    script, seeds = module(EXPERIMENTS / "attack.py"), "3" if count == 3 else "1"
    assert script.main(["--only", name, "--seeds", seeds, "--folder", str(tmp_path)]) == 0
    assert f"{name}: {count} tried, 0 failed." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the power is cut while training", "the network between two hosts breaks"])
def test_attacks_that_only_root_can_try(tmp_path, capsys, name):
    assert module(EXPERIMENTS / "attack.py").main(["--only", name, "--seeds", "1", "--folder", str(tmp_path)]) == 0
    if "not tried: " in (err := capsys.readouterr().err):
        pytest.skip(err)
    assert " tried, 0 failed." in err


@pytest.mark.slow
def test_what_a_command_with_limits_did_is_told(tmp_path, monkeypatch):
    """Its exit code and what it said; that it took too much memory, and too long."""
    from attacks import forked, registry

    monkeypatch.setattr("attacks.forked.CONTEXT", multiprocessing.get_context("spawn"))  # nothing is imported before
    code, err = forked.run(["report", tmp_path / "none"], 4 << 30, 60, tmp_path)
    assert code == 2
    assert err.startswith("hydrajax: report: ")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(registry.Fell, match=r"^did not end within 0\.5 seconds$"):
        forked.run(["train", "--config", tmp_path / "pipe"], 4 << 30, 0.5, tmp_path)
