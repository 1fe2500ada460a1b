"""`hydrajax convert export` of EAGLE drafts: into every format and back; bad ones are refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.torch_eagle import Eagle1, Eagle3
from hydrajax.models.llama_config import LlamaConfig

WIDTH, VOCAB, KNOWN = 32, 96, 40
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
}
LAYER = LlamaConfig(VOCAB, WIDTH, 48, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def three_layers(llama_checkpoint) -> Path:
    return llama_checkpoint(num_hidden_layers=3)


def write(folder: Path, version: int, *, without=(), **fields) -> Path:
    """A released directory of random numbers, with changed fields and without some tensors."""
    torch.manual_seed(1)
    if version == 3:
        state = Eagle3(LAYER, 3, KNOWN).state_dict()
        state["d2t"], state["t2d"] = torch.arange(KNOWN), torch.arange(VOCAB) % 2 == 0
        state["t2d"] &= torch.arange(VOCAB) < 2 * KNOWN
        fields = {"draft_vocab_size": KNOWN} | fields
    else:
        state = Eagle1(LAYER, bias=True).state_dict()
    state = {name: x for name, x in state.items() if name not in without}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return folder


@pytest.mark.parametrize("version", [1, 3])
def test_into_every_format_and_back(program, three_layers, tmp_path, version):
    source = at = write(tmp_path / "source", version)
    own = "eagle-3" if version == 3 else "eagle"
    for step, flags in enumerate([["--format", "speculators"], ["--format", "native"], [], ["--format", own]]):
        folder = tmp_path / str(step)
        result = program("convert", "export", "--base", three_layers, "--draft", at, "--output", folder, *flags)
        assert (result.code, result.err) == (0, "")
        if "native" not in flags:
            assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        at = folder
    for folder in (tmp_path / "2", tmp_path / "3"):
        before, after = (load_file(where / "model.safetensors") for where in (source, folder))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert f"| format | {own} |" in (folder / "README.md").read_text()
    verifier = json.loads((tmp_path / "0" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(three_layers)


def test_bad_drafts_are_refused_in_one_line(program, three_layers, tmp_path):
    bad = {
        "width: got 64, expected 32; the heads were made for another base": write(tmp_path / "1", 1, hidden_size=64),
        "missing tensor 'd2t', the ids of the 40 draft tokens": write(tmp_path / "2", 3, without=["d2t"]),
    }
    for message, source in bad.items():
        result = program("convert", "export", "--base", three_layers, "--draft", source, "--output", tmp_path / "out")
        assert (result.code, result.out) == (2, "")
        assert re.fullmatch(rf"hydrajax: --draft: {re.escape(str(source))}: [^\n]*{message}[^\n]*\n", result.err)
    assert not (tmp_path / "out").exists()
