"""The program: help, version, and the commands that `python -m` starts too."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from hydrajax.cli import build_parser, distill, main, parse, train

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"


def test_without_a_command_it_prints_its_help(program, capsys):
    result = program()
    assert (result.code, result.err) == (0, "")
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert result.out == capsys.readouterr().out
    for command in ("generate", "train", "distill", "convert"):
        assert re.search(rf"^ +{command} +\w", result.out, re.MULTILINE)


def test_the_version_names_jax_and_python_and_starts_no_device(capsys, monkeypatch):
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("started a backend"))
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    expected = f"hydrajax {version('hydrajax')}, jax {version('jax')}, Python {platform.python_version()}\n"
    assert capsys.readouterr().out == expected


def test_training_is_a_command_too(program, capsys):
    """`hydrajax train` and `python -m hydrajax.train` report the same error, and so does distill."""
    said = "hydrajax: --config: unknown key draft.num_draft_head; did you mean draft.num_draft_heads?\n"
    for name, alone, more in (("train", train.main, []), ("distill", distill.main, ["--output", "none.jsonl"])):
        asked = ["--config", str(CONFIGS / "demo_hydra.yaml"), *more, "draft.num_draft_head=3"]
        result = program(name, *asked)
        assert (result.code, result.out, result.err) == (2, "", said)
        assert alone(asked) == 2
        assert capsys.readouterr().err == said


def test_settings_may_stand_anywhere():
    for order in (
        "seed=1 --config own_text data.length=64",
        "--config own_text seed=1 data.length=64 --dry-run",
        "seed=1 data.length=64 --config own_text",
    ):
        args = parse(build_parser(["train"]), ["train", *order.split()])
        assert (args.config, args.overrides) == ("own_text", ["seed=1", "data.length=64"])
