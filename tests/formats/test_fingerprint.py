"""The fingerprint of a base compared with hashlib: independent of the file format, different for other weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.released import refusal, save
from hydrajax.formats.fingerprint import check_fingerprint, fingerprint

EMBEDDING = "model.embed_tokens.weight"
NORMS = ["model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight", "model.norm.weight"]


@pytest.fixture(scope="module")
def checkpoint(llama_checkpoint) -> Path:
    """Larger than the 64 rows that are hashed."""
    return llama_checkpoint(hidden_size=80, head_dim=8)


@pytest.fixture(scope="module")
def state(checkpoint) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, rounded so that bfloat16 holds them."""
    whole = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    return {name: tensor.to(torch.bfloat16).float() for name, tensor in whole.items()}


@pytest.fixture
def saved(checkpoint, tmp_path):
    """``saved(state, name="saved", **config) -> Path``: a directory with these tensors."""
    config = json.loads((checkpoint / "config.json").read_text())
    return lambda state, name="saved", **changes: save(tmp_path / name, state, config | changes)


def by_hashlib(state: dict) -> str:
    digest = hashlib.sha256()
    for name in (EMBEDDING, *NORMS):
        digest.update(state[name][:64].to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


SHAPES = {"vocab_size": 96, "width": 80, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}


def test_it_is_a_hash_of_the_first_rows_and_the_shapes(saved, state):
    assert fingerprint(saved(state)) == {"shapes": SHAPES, "sha256": by_hashlib(state)}


def test_numbers_are_rounded_and_a_model_may_be_smaller_than_the_rows(checkpoint, llama_checkpoint):
    whole = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    assert not torch.equal(whole[EMBEDDING], whole[EMBEDDING].to(torch.bfloat16).float())
    assert fingerprint(checkpoint)["sha256"] == by_hashlib(whole)
    directory = llama_checkpoint(vocab_size=40)  # and width 32
    found = fingerprint(directory)
    assert found["shapes"] == SHAPES | {"vocab_size": 40, "width": 32}
    assert found["sha256"] == by_hashlib(LlamaForCausalLM.from_pretrained(directory).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_the_same_however_the_model_is_saved(state, checkpoint, tmp_path, dtype):
    config = json.loads((checkpoint / "config.json").read_text())
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}
    for kind in ("safetensors", "safetensors shards", "bin", "bin shards"):
        folder = save(tmp_path / kind, cast, config, kind)
        assert fingerprint(folder) == {"shapes": SHAPES, "sha256": by_hashlib(state)}
    torch.save(cast, tmp_path / "bin" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert fingerprint(tmp_path / "bin") == {"shapes": SHAPES, "sha256": by_hashlib(state)}


@pytest.mark.parametrize("name", [EMBEDDING, *NORMS])
def test_it_differs_when_one_number_does(saved, state, name):
    before = fingerprint(saved(state))
    for row in (0, 63):
        changed = state[name].clone()
        changed[(row, *[5] * (changed.ndim - 1))] *= 1.01  # more than half a step of bfloat16
        after = fingerprint(saved(state | {name: changed}))
        assert after["shapes"] == before["shapes"]
        assert after["sha256"] == by_hashlib(state | {name: changed}) != before["sha256"]


def test_it_differs_for_other_shapes(saved, state):
    """Also if the hashed tensors are equal."""
    before = fingerprint(saved(state))
    after = fingerprint(saved(state, num_key_value_heads=4))
    assert after["sha256"] == before["sha256"]
    assert after["shapes"] == SHAPES | {"n_kv_heads": 4}
    assert after != before


def test_tensors_that_are_missing_or_that_no_base_has(saved, state):
    folder = saved({name: tensor for name, tensor in state.items() if name != NORMS[1]})
    refusal(lambda: fingerprint(folder), "base", f"missing tensor '{NORMS[1]}'")
    refusal(lambda: fingerprint(folder, "draft"), "draft: ")
    for odd in (torch.tensor(1.0), torch.ones(80, dtype=torch.float8_e4m3fn)):
        refusal(lambda odd=odd: fingerprint(saved(state | {NORMS[2]: odd})), "base", NORMS[2])


def test_heads_are_refused_on_another_base(saved, state):
    folder = saved(state)
    record = json.loads(json.dumps(fingerprint(folder)))  # as it lies in a file
    check_fingerprint(record, "org/base", folder, "draft")
    tuned = saved(state | {NORMS[2]: state[NORMS[2]] * 1.1}, "tuned")
    refusal(
        lambda: check_fingerprint(record, "org/base", tuned, "draft"),
        *("draft: ", "made for another base, org/base", str(tuned), "same shapes but other weights", "'force'"),
    )
    other = saved(state, "other", num_key_value_heads=4)
    message = refusal(
        lambda: check_fingerprint(record, "", other, "draft"),
        *("draft: ", "of unknown name", "'n_kv_heads': 2", "'n_kv_heads': 4", str(other)),
    )
    assert "'force'" not in message  # other shapes cannot be loaded
    for nonsense in (None, "", {}, [1], {"shapes": SHAPES}, {"sha256": record["sha256"]}):
        refusal(lambda record=nonsense: check_fingerprint(record, "x", folder, "draft"), "draft: ", "another base, x")
