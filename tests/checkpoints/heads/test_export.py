"""Exported directories: transformers computes our logits from them, the loaders give the parameters back bit for bit,
and golden heads keep every tensor of the official file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from released import refusal
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

from hydrajax.checkpoints import tensors
from hydrajax.checkpoints.base import eos_ids, export_llama, load_llama
from hydrajax.checkpoints.heads.export import export_heads
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.hydra_files import Hydra
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.models.attention import causal_mask
from hydrajax.models.base import BoundBase
from hydrajax.models.config import RopeScaling

VOCAB, WIDTH = 61, 32  # of the tiny model


def identical(ours, theirs, dtype) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, mine), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert other.dtype == dtype
        np.testing.assert_array_equal(np.asarray(mine, dtype), other, err_msg=jax.tree_util.keystr(path))


def random_params(drafter, base, seed: int = 4):
    """Normal numbers in place of fresh parameters, which are full of zeros and copies."""
    shapes = jax.eval_shape(lambda: drafter.init(jax.random.key(0), BoundBase(*base)))
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape), x.dtype), shapes)


# --- the base -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 123.0, "rope_scaling": RopeScaling("linear", 2.5)},
        {"rope_theta": 500.0, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16), "norm_eps": 1e-3},
    ],
    ids=["plain", "linear", "llama3"],
)
def test_transformers_computes_our_logits(tiny_model, tmp_path, rope, tied):
    model, params = tiny_model
    params = {name: leaf for name, leaf in params.items() if not (tied and name == "lm_head")}
    model = model.clone(config=model.config.replace(**rope, tied_lm_head=tied))
    export_llama(tmp_path / "base", model, params, dtype=None)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 40))
    positions = np.broadcast_to(np.arange(40), tokens.shape)
    hidden = model.apply({"params": params}, tokens, positions, causal_mask(40)).hidden
    ours = BoundBase(model, params).logits(hidden)
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    assert expected.std() > 1
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_llama_round_trip(tiny_model, tmp_path, dtype):
    model, params = tiny_model
    export_llama(tmp_path / "base", model, params, dtype=dtype)
    loaded, ours = load_llama(tmp_path / "base", dtype)
    assert loaded.config == model.config
    identical(params, ours, dtype)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["torch_dtype"] == np.dtype(dtype).name


def test_tensors_are_those_transformers_saves(tiny_checkpoint, tmp_path):
    model, params = load_llama(tiny_checkpoint)
    export_llama(tmp_path / "base", model, params, dtype=None)
    original = load_file(tiny_checkpoint / "model.safetensors")
    exported = load_file(tmp_path / "base" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)


class FakeTokenizer:
    bos_token_id = 1

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(("ids", "written"), [((), None), ((5,), 5), ((5, 7), [5, 7])])
def test_config_tokenizer_and_extra(tiny_model, tmp_path, ids, written):
    export_llama(tmp_path / "base", *tiny_model, tokenizer=FakeTokenizer(), eos_ids=ids, extra={"steps": 10})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["steps"]) == (1, written, 10)
    assert eos_ids(tmp_path / "base") == ids
    assert (tmp_path / "base" / "tokenizer.json").exists()


# --- draft heads ----------------------------------------------------------------------------------------------


def heads_of(kind: str, config, **settings):
    sizes = {"n_heads": 3, "width": WIDTH, "vocab_size": VOCAB} | settings
    if kind.startswith("hydra"):
        heads = HydraHeads(**sizes)
    else:
        heads = MedusaHeads(**sizes, lm_head_bias=kind.startswith("ungrounded"))
    return WithPrefix(heads, config) if kind.endswith("++") else heads


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("kind", "arch", "grounded"),
    [
        ("hydra", "mlp", True),
        ("hydra++", "prefix-mlp", True),
        ("ungrounded", "mlp", False),
        ("ungrounded++", "prefix-mlp", False),
        ("medusa", None, None),
    ],
)
def test_heads_round_trip(tiny_model, tmp_path, kind, arch, grounded, share, dtype):
    model, _ = tiny_model
    drafter = heads_of(kind, model.config, n_layers=4, share_blocks=share, dtype=jnp.dtype(dtype))
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params, base_name="the-base", dtype=dtype, extra={"steps": 10})
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config.get("hydra_head_arch"), config.get("grounded_heads")) == (arch, grounded)
    assert (config["base_model_name_or_path"], config["steps"]) == ("the-base", 10)
    loaded, ours = load_draft(tmp_path / "heads", model.config, dtype)
    assert loaded == drafter
    identical(params, ours, dtype)


@pytest.mark.parametrize("kind", ["hydra", "hydra++", "medusa"])
def test_one_layer_and_float32_as_bfloat16(tiny_model, tmp_path, kind):
    """The default dtype rounds to nearest even, as torch does."""
    model, _ = tiny_model
    drafter = heads_of(kind, model.config, n_layers=1)
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params)
    loaded, ours = load_draft(tmp_path / "heads", model.config)
    assert loaded == drafter
    rounded = jax.tree.map(lambda x: torch.tensor(np.asarray(x)).bfloat16().float().numpy(), params)
    identical(rounded, ours, jnp.float32)


def test_dropout_is_not_written(tiny_model, tmp_path):
    model, _ = tiny_model
    drafter = heads_of("hydra", model.config, dropout=0.2)
    export_heads(tmp_path / "heads", drafter, random_params(drafter, tiny_model))
    assert load_draft(tmp_path / "heads", model.config)[0] == dataclasses.replace(drafter, dropout=0.0)


def test_hidden_state_offset(tiny_model, tmp_path):
    model, _ = tiny_model
    drafter = heads_of("hydra++", model.config, hidden_state_offset=1)
    export_heads(tmp_path / "heads", drafter, random_params(drafter, tiny_model))
    assert load_draft(tmp_path / "heads", model.config)[0].reads == (1,)


@pytest.mark.parametrize("arch", ["hydra_mlp", "hydra_pp"])
def test_golden_heads_keep_every_tensor(golden, tmp_path, arch):
    model, _ = load_llama(golden / "base" / "mha")
    source = golden / arch / "heads"
    drafter, params = load_draft(source, model.config)
    export_heads(tmp_path / "heads", drafter, params, dtype=None)
    original = load_file(source / "hydra_lm_head.safetensors")
    exported = load_file(tmp_path / "heads" / "hydra_lm_head.safetensors")
    theirs = {name for name in original if not re.fullmatch(Hydra.ignored, name)}
    assert len(theirs) > 10
    assert exported.keys() == theirs
    for name in theirs:
        np.testing.assert_array_equal(exported[name], original[name], err_msg=name)
    fields = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "heads" / "config.json").read_text())
    for field in fields.keys() - {"base_model_name_or_path", "transformers_version"}:
        assert written[field] == fields[field]


def test_drafters_without_an_official_layout(tiny_model, tmp_path):
    config = tiny_model[0].config
    for drafter, pieces in (
        (NoDrafter(), ("NoDrafter", "HydraHeads")),
        (heads_of("medusa++", config), ("WithPrefix(MedusaHeads)", "lm_head_bias")),
        (heads_of("medusa", config, hidden_state_offset=1), ("hidden_state_offset", "1")),
        (WithPrefix(heads_of("hydra++", config), config), ("WithPrefix",)),
    ):
        refusal(lambda drafter=drafter: export_heads(tmp_path / "heads", drafter, {}), "export", *pieces)
    assert list(tmp_path.iterdir()) == []


# --- the directory --------------------------------------------------------------------------------------------


def test_earlier_export_is_replaced(tiny_model, tmp_path):
    target = tmp_path / "deep" / "base"
    export_llama(target, *tiny_model, tokenizer=FakeTokenizer())
    export_llama(target, *tiny_model, dtype=jnp.float32)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    assert load_file(target / "model.safetensors")["model.norm.weight"].dtype == np.float32
    assert [path.name for path in target.parent.iterdir()] == ["base"]


def test_directory_with_other_files_is_kept(tiny_model, tmp_path):
    target = tmp_path / "base"
    export_llama(target, *tiny_model)
    (target / "notes.txt").write_text("mine")
    refusal(lambda: export_llama(target, *tiny_model), "export", str(target), "'notes.txt'")
    assert (target / "notes.txt").read_text() == "mine"
    export_llama(target, *tiny_model, overwrite=True)
    assert not (target / "notes.txt").exists()


def test_checkpoint_of_someone_else_is_kept(tiny_model, tiny_checkpoint, tmp_path):
    target = tmp_path / "base"
    shutil.copytree(tiny_checkpoint, target)
    refusal(lambda: export_llama(target, *tiny_model), "'config.json'")
    load_llama(target)
    (tmp_path / "file").write_text("")
    refusal(lambda: export_llama(tmp_path / "file", *tiny_model), "is a file")


def test_failed_export_leaves_the_earlier_one(tiny_model, tmp_path, monkeypatch):
    target = tmp_path / "base"
    export_llama(target, *tiny_model, dtype=jnp.float32)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full_disk)
    refusal(lambda: export_llama(target, *tiny_model), "cannot write", str(target), "No space left on device")
    monkeypatch.undo()
    identical(tiny_model[1], load_llama(target)[1], jnp.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_failed_rename_leaves_the_earlier_one(tiny_model, tmp_path, monkeypatch):
    target = tmp_path / "base"
    export_llama(target, *tiny_model, dtype=jnp.float32)

    def rename(path, to):
        if path.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        os.rename(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    refusal(lambda: export_llama(target, *tiny_model), "cannot write", "Input/output error")
    identical(tiny_model[1], load_llama(target)[1], jnp.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
