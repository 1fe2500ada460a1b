"""The fingerprint of a base compared with hashlib, and heads that record their base: they load on no other one."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from helpers.released import Medusa2, medusa_config, randomise, refusal, save, vllm, vllm_config
from hydrajax import api, assets
from hydrajax.formats.export import export_heads
from hydrajax.formats.fingerprint import check_fingerprint, fingerprint
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama_config import LlamaConfig

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


def test_numbers_are_rounded_and_a_model_may_be_smaller_than_the_rows(checkpoint, llama_checkpoint):
    whole = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    assert not torch.equal(whole[EMBEDDING], whole[EMBEDDING].to(torch.bfloat16).float())
    assert fingerprint(checkpoint)["sha256"] == by_hashlib(whole)
    directory = llama_checkpoint(vocab_size=40)  # and width 32
    found = fingerprint(directory)
    assert found["shapes"] == SHAPES | {"vocab_size": 40, "width": 32}
    assert found["sha256"] == by_hashlib(LlamaForCausalLM.from_pretrained(directory).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_a_hash_of_the_first_rows_and_the_shapes_however_the_model_is_saved(state, checkpoint, tmp_path, dtype):
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
    assert (drafter.spec.depth, len(drafter.vocabulary), drafter.prefix.window) == (3, 12288, 512)
    drafter, _ = load_draft(resolve("dspark", "draft", SMOLLM2), SMOLLM2)
    assert (drafter.spec.depth, len(drafter.vocabulary), drafter.aux_hidden_layers) == (6, 12288, (20, 10, 0))


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


def test_a_medusa_2_checkpoint_is_the_base_in_it(tiny_checkpoint, base_state, base_config, tmp_path):
    state = base_state | randomise(Medusa2(2, 1)).state_dict()
    save(tmp_path, state, base_config | medusa_config(2, 1), "safetensors shards")
    assert fingerprint(tmp_path) == fingerprint(tiny_checkpoint)
