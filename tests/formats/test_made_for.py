"""Heads that record their base are refused by any other, unless forced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import pytest
import torch
from safetensors.torch import save_file

from helpers.released import Medusa2, medusa_config, randomise, refusal, save, vllm, vllm_config
from hydrajax import api, assets
from hydrajax.formats.export import export_heads
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama_config import LlamaConfig


@pytest.fixture(scope="module")
def other_weights(base_state, tiny_checkpoint, tmp_path_factory) -> Path:
    """A fine-tune of the tiny checkpoint: its shapes, one number of its last norm doubled."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("fine") / "fine-tune")
    state = {name: x.clone() for name, x in base_state.items()}
    state["model.norm.weight"][-1] *= 2
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def some_heads(base, tmp_path_factory) -> tuple:
    """``(drafter, params)``"""
    state = randomise(vllm(2, 1, bias=True)).state_dict()
    config = vllm_config(2, 1, medusa_fc_bias=True)
    return load_draft(save(tmp_path_factory.mktemp("heads"), state, config), base.config)


@pytest.fixture
def marked_heads(request, tiny_checkpoint, some_heads, tmp_path) -> Path:
    """Heads that record the tiny checkpoint as their base, named ``lab/tiny``; Medusa's unless parametrised."""
    mark = {"base_name": "lab/tiny", "base_fingerprint": fingerprint(tiny_checkpoint)}
    export_heads(tmp_path / "heads", *some_heads, format=getattr(request, "param", "medusa"), dtype=None, **mark)
    return tmp_path / "heads"


SMOLLM2 = LlamaConfig(
    49152, 576, 1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, max_positions=8192, tied_lm_head=True
)


def test_a_bundled_name_means_the_heads_for_the_base():
    assert resolve("medusa", "draft") == assets.path("medusa")
    assert resolve("medusa", "draft", read_config(assets.base())) == assets.path("medusa")
    assert resolve("hydra", "draft", SMOLLM2) == assets.path("hydra")  # none of these: refused when it is loaded
    own = assets.path("smollm2_medusa")
    assert resolve("medusa", "draft", SMOLLM2) == own
    assert assets.drafts_of("smollm2") == ["medusa", "hydra++", "dspark"]
    drafter, params = load_draft(own, SMOLLM2)
    assert (drafter.spec.depth, len(drafter.vocabulary), drafter.lm_head.shared) == (4, 8192, True)
    assert params.keys() == {f"head_{k}" for k in range(4)}
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(params))
    refusal(lambda: load_draft(own, read_config(assets.base())), "draft: ", "another base")
    drafter, _ = load_draft(resolve("hydra++", "draft", SMOLLM2), SMOLLM2)
    assert (drafter.spec.depth, len(drafter.vocabulary), drafter.prefix.window) == (3, 8192, 512)
    drafter, _ = load_draft(resolve("dspark", "draft", SMOLLM2), SMOLLM2)
    assert (drafter.spec.depth, len(drafter.vocabulary), drafter.aux_hidden_layers) == (6, 8192, (20, 10, 0))


def test_a_bundled_name_of_another_base_alone_is_refused():
    assert resolve("dspark", "draft") == assets.path("smollm2_dspark")
    shipped = read_config(assets.base())
    refusal(lambda: load_draft(resolve("dspark", "draft", shipped), shipped), "draft: ", "another base")


def refused(directory: Path, base: BoundBase, *pieces: str, **options) -> str:
    return refusal(lambda: load_draft(directory, base.config, **options), "draft", "made for another base", *pieces)


in_every_format = pytest.mark.parametrize("marked_heads", ["medusa", "vllm-medusa", "native"], indirect=True)


@in_every_format
def test_heads_of_another_base_are_refused_unless_forced(base, marked_heads, tiny_checkpoint, other_weights):
    load_draft(marked_heads, base.config, base_directory=tiny_checkpoint)
    pieces = ("lab/tiny", str(other_weights), "other weights", "'force' loads them")
    refused(marked_heads, base, *pieces, base_directory=other_weights)
    load_draft(marked_heads, base.config)  # nothing to compare with
    refusal(lambda: api.load(other_weights, marked_heads), "draft: ", "made for another base, lab/tiny", "'force'")
    assert api.load(other_weights, marked_heads, force=True).drafter.num_draft_heads == 2


def test_heads_of_a_base_of_other_shapes(base, marked_heads, llama_checkpoint):
    """Another depth, where width and vocabulary would fit, and another width: forcing them would not help."""
    deeper = llama_checkpoint(num_hidden_layers=3)
    message = refused(
        marked_heads, base, "lab/tiny", str(deeper), "'n_layers': 2", "'n_layers': 3", base_directory=deeper
    )
    assert "force" not in message
    wide, width = llama_checkpoint(hidden_size=64), "width: got 32, expected 64; the heads were made for another base"
    refusal(lambda: api.load(wide, marked_heads, force=True), width)


@pytest.mark.parametrize(
    ("first", "then"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)],
    ids=str,
)
def test_the_same_base_in_another_dtype_is_the_same(base, base_state, base_config, some_heads, tmp_path, first, then):
    one = {name: x.to(first) for name, x in base_state.items()}
    other = {name: x.to(then) for name, x in one.items()}
    save(tmp_path / "one", one, base_config)
    save(tmp_path / "other", other, base_config, "bin shards")
    export_heads(tmp_path / "heads", *some_heads, base_fingerprint=fingerprint(tmp_path / "one"))
    load_draft(tmp_path / "heads", base.config, base_directory=tmp_path / "other")


def test_a_medusa_2_checkpoint_is_the_base_in_it(tiny_checkpoint, base_state, base_config, tmp_path):
    state = base_state | randomise(Medusa2(2, 1)).state_dict()
    save(tmp_path, state, base_config | medusa_config(2, 1), "safetensors shards")
    assert fingerprint(tmp_path) == fingerprint(tiny_checkpoint)


@pytest.mark.parametrize("record", ["text", ["list"], {"shapes": 3}, {"shapes": {}, "sha256": None}, 7])
def test_an_empty_record_is_another_base(marked_heads, base, tiny_checkpoint, record):
    path = marked_heads / "config.json"
    config = json.loads(path.read_text())
    config["hydrajax"]["base"] = record
    path.write_text(json.dumps(config))
    refused(marked_heads, base, base_directory=tiny_checkpoint)
