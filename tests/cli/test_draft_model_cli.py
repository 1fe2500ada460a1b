"""The commands with a small model as the draft, and with the MTP module in the base's own files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.outputs import write_lines
from hydrajax.drafters.mtp import MTP
from hydrajax.families.family_layout import decoder_layer
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.tensors import save_safetensors
from hydrajax.models.layout import shapes

TEXT, FEW = ("--prompt", "the tree"), ("--max-new-tokens", 16, "--limit", 2)


@pytest.fixture(scope="module")
def draft(llama_checkpoint, tokenizer, tmp_path_factory) -> Path:
    """Of another family than the base, padded to fewer tokens, of which the tokenizer has 300."""
    settings = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1}
    small = llama_checkpoint(vocab_size=304, max_position_embeddings=128, **settings)
    folder = shutil.copytree(small, tmp_path_factory.mktemp("draft") / "small")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("the tree", "of the draft")])


@pytest.mark.slow
def test_tree_search_of_chains(program, base, draft, prompts, tmp_path):
    path = tmp_path / "tree.json"
    flags = ("--prompts", prompts, "--how", "chains", "--shapes", "static", "--sizes", "2,3", "--largest", 3)
    flags += ("--repeats", 1, "--max-new-tokens", 8, "--output", path)
    done = program("tree", "search", "--base", base, "--draft", draft, *flags)
    origin = json.loads(path.read_text())["provenance"]
    alpha, cost = origin["chain"]["acceptance"], origin["chain"]["draft_cost"]
    assert [row["nodes"] for row in origin["measured"]] == [2, 3]
    expected = [row["expected_tokens_per_step"] for row in origin["measured"]]
    assert expected == pytest.approx([1 + alpha, 1 + alpha + alpha**2])
    assert all(row["equal"] for row in origin["measured"])
    assert f"α {alpha:.2f}, c {cost:.2f}: " in done.out


@pytest.mark.slow
def test_a_draft_larger_than_the_base_is_warned_of_in_one_line(base, draft):
    """In a process of its own, as pytest takes warnings for itself."""
    command = [sys.executable, "-m", "hydrajax", "generate", "--base", draft, "--draft", base, *TEXT]
    done = subprocess.run(
        [*map(str, command), "--tree", "chain-2", "--max-new-tokens", "4"], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stderr.splitlines() if "parameters" in line]
    assert line.startswith(f"hydrajax: draft: {base} has ")
    assert ".py:" not in done.stderr


@pytest.fixture(scope="module")
def with_module(base, tmp_path_factory) -> Path:
    """The tiny base with a random module after its last layer."""
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("mtp") / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    layer, prefix = MTP.layer_of(read_config(folder)), f"model.layers.{config['num_hidden_layers']}."
    wanted = shapes(decoder_layer((), prefix, layer)) | {f"{prefix}eh_proj.weight": (layer.width, 2 * layer.width)}
    wanted |= {f"{prefix}{name}.weight": (layer.width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    random = np.random.default_rng(0)
    own = {
        name: (0.3 * random.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in wanted.items()
    }
    save_safetensors(folder / "model.safetensors", load_file(folder / "model.safetensors") | own)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def test_export_and_back(program, with_module, tmp_path):
    own, first, last = (tmp_path / name for name in ("own", "first", "last"))
    for draft, folder, flags in (("mtp", own, ["--format", "native"]), ("mtp", first, []), (own, last, [])):
        result = program("convert", "export", "--base", with_module, "--draft", draft, "--output", folder, *flags)
        assert result.err == ""
    own, tensors, again = (load_file(at / "model.safetensors") for at in (with_module, first, last))
    assert tensors.keys() == again.keys() == {name for name in own if name.startswith("model.layers.1.")}
    for name, x in tensors.items():
        np.testing.assert_array_equal(x, own[name])
        np.testing.assert_array_equal(x, again[name])
