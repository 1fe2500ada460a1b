"""Bases in Hugging Face directories: read as torch wrote them, exported for transformers, and refused if damaged."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from helpers.damage import edit
from helpers.draft_heads import identical
from helpers.released import refusal
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama
from hydrajax.lowbit import tiles
from hydrajax.models.layout import Parameter
from hydrajax.ops import trace

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def copy(tiny_checkpoint, tmp_path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def change_tensors(directory: Path, remove=(), **changes) -> None:
    """Rewrite model.safetensors; names in ``changes`` have ``__`` for dots."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({key: value for key, value in tensors.items() if key not in remove}, directory / "model.safetensors")


def refused(directory, *pieces: str) -> None:
    refusal(lambda: load_llama(directory), *pieces)


def params_of(directory, dtype=jnp.float32):
    return load_llama(directory, dtype)[1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16(tiny_checkpoint, tmp_path, dtype):
    """Of a file in bfloat16, and rounded to nearest even from one in float32, as torch rounds.

    tests/models/test_families.py shows that every tensor arrives, by logits and by exports with the file's numbers.
    """
    LlamaForCausalLM.from_pretrained(tiny_checkpoint).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")[Q].dtype == torch.bfloat16
    identical(params_of(tiny_checkpoint, jnp.bfloat16), params_of(tmp_path, dtype), dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_an_lm_head_is_quantised_some_columns_at_a_time(llama_checkpoint, monkeypatch, tied):
    directory = llama_checkpoint(tie_word_embeddings=tied)
    monkeypatch.setattr(trace, "has_few_bits", lambda: True)
    whole = load_llama(directory, quantize="int4")[1]
    assert whole["embedding" if tied else "lm_head"].values.shape[0] > 1  # tiles
    read, slices = Parameter.__getitem__, []
    monkeypatch.setattr(Parameter, "__getitem__", lambda self, index: slices.append(index) or read(self, index))
    monkeypatch.setattr(tiles, "COLUMNS_AT_ONCE", 64)
    parts = load_llama(directory, quantize="int4")[1]
    assert (slice(None), slice(64, 128)) in slices
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def test_rotary_buffers_of_old_files_are_ignored(copy):
    before = params_of(copy)
    change_tensors(
        copy,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        model__layers__1__self_attn__rotary_emb__cos_cached=torch.ones(1, 1, 8, 8),
        model__rotary_emb__inv_freq=torch.ones(4),
    )
    identical(params_of(copy), before)


def test_refused_configurations(copy):
    path = copy / "config.json"
    whole = path.read_text()
    for field in ("hidden_size", "num_hidden_layers", "vocab_size", "model_type"):
        edit(path, remove=[field])
        refused(copy, "config.json", field)
        path.write_text(whole)
    for text, piece in ((b"{not json", "as JSON"), (b"\xff\xfe\x00", "as JSON"), (b"[1, 2]", "JSON object")):
        path.write_bytes(text)
        refused(copy, "base", "config.json", piece)
    path.write_text(whole)
    edit(path, num_hidden_layers=4)  # a layer has nine tensors; five are named
    refused(copy, str(copy), "missing tensors 'model.layers.2.input_layernorm.weight'", "and 13 more")
    edit(path, num_hidden_layers=1)
    refused(copy, "unexpected tensors 'model.layers.1.")
    path.unlink()
    refused(copy, "base", "no such file", "config.json")
    refused(copy / "nowhere", "base", "no such directory", str(copy / "nowhere"))


EOS_IDS = [  # of generation_config.json, of config.json, and what follows: the former comes first, as in generate
    *((7, 2, (7,)), ([7, 9], 2, (7, 9)), (0, 2, (0,)), (None, 2, (2,)), (None, [2, 3], (2, 3)), (None, None, ())),
    *(("no file", 2, (2,)), ("no file", None, ())),
    *((wrong, 2, None) for wrong in ("</s>", [2, "</s>"], True, 2.5)),
]


@pytest.mark.parametrize(("generation", "config", "expected"), EOS_IDS)
def test_eos_ids(tmp_path, generation, config, expected):
    if generation != "no file":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if expected is None:
        refusal(lambda: Checkpoint(tmp_path).eos_ids, "eos_token_id")
    else:
        assert Checkpoint(tmp_path).eos_ids == expected


class FakeTokenizer:
    bos_token_id = 1

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(("ids", "written"), [((), None), ((5,), 5), ((5, 7), [5, 7])])
def test_config_tokenizer_and_extra(tiny_model, tmp_path, ids, written):
    export_llama(tmp_path / "base", *tiny_model, tokenizer=FakeTokenizer(), eos_ids=ids, extra={"steps": 10})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["steps"]) == (1, written, 10)
    assert Checkpoint(tmp_path / "base").eos_ids == ids
    assert (tmp_path / "base" / "tokenizer.json").exists()


def test_earlier_export_is_replaced(tiny_model, tmp_path):
    target = tmp_path / "deep" / "base"
    export_llama(target, *tiny_model, tokenizer=FakeTokenizer())
    export_llama(target, *tiny_model, dtype=jnp.float32)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    assert load_file(target / "model.safetensors")["model.norm.weight"].dtype == torch.float32
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


@pytest.mark.parametrize("step", ["save", "rename"])
def test_a_failed_export_leaves_the_earlier_one(tiny_model, tmp_path, monkeypatch, step):
    target = tmp_path / "base"
    export_llama(target, *tiny_model, dtype=jnp.float32)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def rename(path, to):
        if path.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        os.rename(path, to)

    if step == "save":
        monkeypatch.setattr("hydrajax.formats.tensors.save_file", full_disk)
    else:
        monkeypatch.setattr(Path, "rename", rename)
    reason = "No space left on device" if step == "save" else "Input/output error"
    refusal(lambda: export_llama(target, *tiny_model), "cannot write", str(target), reason)
    monkeypatch.undo()
    identical(tiny_model[1], load_llama(target)[1], jnp.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
