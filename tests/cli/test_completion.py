"""Tab completion: the answers to a shell, and the completions of each argument."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from argcomplete import CompletionFinder

from hydrajax import assets
from hydrajax.cli import EPILOG, build_parser
from hydrajax.cli.completion import add_completers
from hydrajax.formats.draft_registry import without_weights


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory that contains a directory, a tree and a text."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "oak.json").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hydrajax ev", "evaluate "),
        pytest.param(
            "hydrajax generate --quantize ",
            "int8\x0bint8-64\x0bint8-128\x0bint4\x0bint4-64\x0bint4-128\x0bfp8",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_program_answers_a_shell(line, expected, tmp_path):
    """argcomplete's protocol: the line and the cursor are in the environment, the answer is in a file."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    command = [sys.executable, "-m", "hydrajax"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "answer").read_text() == expected


def completions(*words: str) -> set[str]:
    """Return the completions of the last word."""
    parser = build_parser(list(words))
    add_completers(parser)
    *before, begun = ["hydrajax", *words]
    return {found.strip() for found in CompletionFinder(parser)._get_completions(before, begun, "", None)}


@pytest.mark.usefixtures("folder")
def test_completions_of_arguments():
    assert completions("generate", "--base", "") == {"llama/", "shipped", "smollm2"}
    assert completions("chat", "--draft", "") == {"llama/", *without_weights(), *assets.DRAFT_NAMES}
    assert completions("evaluate", "--draft", "lo") == {"lookahead", "lookup"}
    assert completions("convert", "export", "--output", "") == {"llama/"}
    assert completions("bench", "--tree", "o") == {"oak.json"}
    assert completions("bench", "--tree", "mc") == {"mc_sim_7b_63"}
    assert completions("generate", "--prompts", "n") == {"notes.txt"}
    assert completions("generate", "--rule", "") == {"greedy", "typical", "exact", "rejection"}
    sizes = {"none", "int8", "int8-64", "int8-128", "int4", "int4-64", "int4-128", "fp8"}
    assert completions("generate", "--quantize", "") == sizes
    assert "--temperature" in completions("generate", "--t")


def test_the_help_tells_how_to_enable_it(program):
    assert "register-python-argcomplete hydrajax" in EPILOG
    assert EPILOG in program().out
