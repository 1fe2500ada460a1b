"""A tiny base with a byte-level tokenizer, Medusa heads for it, and the program run in-process."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers import commands, released, small_tokenizer
from hydrajax.cli import main

VOCAB, WIDTH, CONTEXT, HEADS = 320, 32, 128, 2


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer.byte_level()


@pytest.fixture(scope="session")
def wordless(llama_checkpoint) -> Path:
    """A base without a tokenizer."""
    return llama_checkpoint(vocab_size=VOCAB, hidden_size=WIDTH, max_position_embeddings=CONTEXT, num_hidden_layers=1)


@pytest.fixture(scope="session")
def base(wordless, tokenizer, tmp_path_factory) -> Path:
    """The same base with the tokenizer, whose vocabulary is smaller than the model's."""
    folder = shutil.copytree(wordless, tmp_path_factory.mktemp("base") / "tiny")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def heads(tmp_path_factory) -> Path:
    """Random Medusa heads in the released layout."""
    state, random = released.Medusa(HEADS, 1, VOCAB).state_dict(), torch.Generator().manual_seed(3)
    for name, x in state.items():
        x.zero_() if name.endswith("bias") else x.normal_(0, 0.1 if "linear" in name else 1, generator=random)
    config = released.medusa_config(HEADS, 1) | {"base_model_name_or_path": "tiny"}
    return released.save(tmp_path_factory.mktemp("heads"), state, config)


@pytest.fixture(scope="session")
def wide_tree(tmp_path_factory) -> Path:
    """A tree file so wide that even random heads hit now and then: 30 guesses, the first 6 with 6 more each."""
    choices = [[i] for i in range(30)] + [[i, j] for i in range(6) for j in range(6)]
    path = tmp_path_factory.mktemp("tree") / "wide.json"
    path.write_text(json.dumps(choices))
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the program sets it; this restores it


@pytest.fixture
def program(capsys):
    """``program(*argv, code=0)`` runs the command line in this process: its ``out`` and ``err``."""
    return partial(commands.run, main, capsys)


@pytest.fixture
def refused(program):
    """``refused(message, *argv)``: check that a command line fails with one line that contains the message."""

    def run(message: str, *argv) -> None:
        found = program(*argv, code=2)
        assert found.err.count("\n") == 1
        assert message in found.err

    return run
