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


@pytest.mark.parametrize(
    ("name", "alone", "more"), [("train", train.main, []), ("distill", distill.main, ["--output", "none.jsonl"])]
)
def test_training_is_a_command_too(program, capsys, name, alone, more):
    """`hydrajax train` and `python -m hydrajax.train` report the same error, and so does distill."""
    asked = ["--config", str(CONFIGS / "demo_hydra.yaml"), *more, "draft.num_draft_head=3"]
    result = program(name, *asked)
    assert (result.code, result.out) == (2, "")
    assert result.err == "hydrajax: --config: unknown key draft.num_draft_head; did you mean draft.num_draft_heads?\n"
    assert alone(asked) == 2
    assert capsys.readouterr().err == result.err


@pytest.mark.parametrize(
    "order",
    [
        ["seed=1", "--config", "own_text", "data.length=64"],
        ["--config", "own_text", "seed=1", "data.length=64", "--dry-run"],
        ["seed=1", "data.length=64", "--config", "own_text"],
    ],
)
def test_settings_may_stand_anywhere(order):
    args = parse(build_parser(["train"]), ["train", *order])
    assert (args.config, args.overrides) == ("own_text", ["seed=1", "data.length=64"])


def test_unknown_flags_next_to_settings_are_refused(program):
    result = program("train", "seed=1", "--config", "own_text", "--dryrun", "data.length=64")
    assert (result.code, result.err) == (
        2,
        "hydrajax: unrecognized arguments: --dryrun data.length=64; did you mean --dry-run? (see hydrajax --help)\n",
    )


@pytest.mark.parametrize(
    ("command", "flag", "hint"),
    [
        ("generate", "--drft=lookup", "; did you mean --draft?"),
        ("generate", "--max_length", "; did you mean --max-new-tokens?"),
        ("generate", "--prompt-lookup-num-tokens", '; did you mean --draft="lookup"?'),
        ("generate", "--num-beams", "; hydrajax has no beam search"),
        ("serve", "--streamer", ""),  # not --tree
        ("serve", "--stop-strings", ""),  # it has no --stop
    ],
)
def test_unknown_flags_get_a_hint_only_if_a_flag_is_meant(program, command, flag, hint):
    result = program(command, "--base", "x", "--prompt" if command == "generate" else "--port", "1", flag, "1")
    assert (result.code, result.err) == (2, f"hydrajax: unrecognized arguments: {flag} 1{hint} (see hydrajax --help)\n")
