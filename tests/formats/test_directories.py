"""Exported directories appear whole or not at all, and replace only an earlier export."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.draft_heads import identical
from helpers.released import refusal
from hydrajax.formats import tensors
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama


class FakeTokenizer:
    bos_token_id = 1

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


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
        monkeypatch.setattr(tensors, "save_file", full_disk)
    else:
        monkeypatch.setattr(Path, "rename", rename)
    reason = "No space left on device" if step == "save" else "Input/output error"
    refusal(lambda: export_llama(target, *tiny_model), "cannot write", str(target), reason)
    monkeypatch.undo()
    identical(tiny_model[1], load_llama(target)[1], jnp.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
