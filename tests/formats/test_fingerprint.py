"""The fingerprint of a base compared with hashlib: independent of the file format, different for other weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaForCausalLM

from helpers.released import refusal
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
    """``saved(state) -> Path``: a directory with the checkpoint's config.json and these tensors."""

    def save(state: dict, name: str = "saved", **config) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        content = json.loads((checkpoint / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
        safetensors.torch.save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
        return folder

    return save


def by_hashlib(state: dict) -> str:
    digest = hashlib.sha256()
    for name in (EMBEDDING, *NORMS):
        digest.update(state[name][:64].to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


SHAPES = {"vocab_size": 96, "width": 80, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}


def test_it_is_a_hash_of_the_first_rows_and_the_shapes(saved, state):
    assert fingerprint(saved(state)) == {"shapes": SHAPES, "sha256": by_hashlib(state)}


def test_numbers_are_rounded_to_bfloat16(checkpoint):
    whole = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    assert not torch.equal(whole[EMBEDDING], whole[EMBEDDING].to(torch.bfloat16).float())
    assert fingerprint(checkpoint)["sha256"] == by_hashlib(whole)


def test_a_model_smaller_than_the_rows(llama_checkpoint):
    directory = llama_checkpoint(vocab_size=40)  # and width 32
    found = fingerprint(directory)
    assert found["shapes"] == SHAPES | {"vocab_size": 40, "width": 32}
    assert found["sha256"] == by_hashlib(LlamaForCausalLM.from_pretrained(directory).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_the_same_however_the_model_is_saved(saved, state, checkpoint, tmp_path, dtype):
    expected = {"shapes": SHAPES, "sha256": by_hashlib(state)}
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}
    assert fingerprint(saved(cast)) == expected

    model = LlamaForCausalLM.from_pretrained(checkpoint)
    model.load_state_dict(state)
    model.to(dtype).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert fingerprint(tmp_path / "shards") == expected

    torch_file = tmp_path / "torch"
    torch_file.mkdir()
    shutil.copy(checkpoint / "config.json", torch_file)
    for zipped in (True, False):
        torch.save(cast, torch_file / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert fingerprint(torch_file) == expected
    (torch_file / "pytorch_model.bin").unlink()
    halves = {f"pytorch_model-{i}.bin": dict(list(cast.items())[i::2]) for i in range(2)}
    for name, part in halves.items():
        torch.save(part, torch_file / name)
    index = {"weight_map": {key: name for name, part in halves.items() for key in part}}
    (torch_file / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert fingerprint(torch_file) == expected


@pytest.mark.parametrize("name", [EMBEDDING, *NORMS])
@pytest.mark.parametrize("row", [0, 63])
def test_it_differs_when_one_number_does(saved, state, name, row):
    before = fingerprint(saved(state))
    changed = state[name].clone()
    changed[(row, *[5] * (changed.ndim - 1))] *= 1.01  # more than half a step of bfloat16
    after = fingerprint(saved(state | {name: changed}))
    assert after["shapes"] == before["shapes"]
    assert after["sha256"] != before["sha256"]
    assert after["sha256"] == by_hashlib(state | {name: changed})


def test_it_differs_for_other_shapes(saved, state):
    """Also if the hashed tensors are equal."""
    before = fingerprint(saved(state))
    after = fingerprint(saved(state, num_key_value_heads=4))
    assert after["sha256"] == before["sha256"]
    assert after["shapes"] == SHAPES | {"n_kv_heads": 4}
    assert after != before


def test_missing_tensor(saved, state):
    folder = saved({name: tensor for name, tensor in state.items() if name != NORMS[1]})
    refusal(lambda: fingerprint(folder), "base", f"missing tensor '{NORMS[1]}'")
    refusal(lambda: fingerprint(folder, "draft"), "draft: ")


@pytest.mark.parametrize("odd", [torch.tensor(1.0), torch.ones(80, dtype=torch.float8_e4m3fn)], ids=["scalar", "fp8"])
def test_tensors_that_no_base_has(saved, state, odd):
    refusal(lambda: fingerprint(saved(state | {NORMS[2]: odd})), "base", NORMS[2])


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
