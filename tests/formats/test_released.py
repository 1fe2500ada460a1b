"""Released Hydra and Medusa heads, written by torch modules of the formulas in docs/design.md 4, give torch's logits;
damaged, foreign and hostile directories are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from helpers.forced import forced_logits
from helpers.released import WIDTH, Hydra, Medusa, one_layer, refusal
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.load import load_draft
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase

TOLERANCE = 1e-5  # relative to logits of magnitude 1 to 10
VOCAB = 96  # of the tiny checkpoint


def hydra(base, n_heads: int, n_layers: int, grounded: bool, blocks: str, prefix: bool) -> Hydra:
    """Released heads for a base of transformers; ``blocks`` 'shared' repeats one block, 'separate' does not."""
    settings = {"grounded": grounded, "shared": blocks == "shared"}
    layer = one_layer(base.config) if prefix else None
    return Hydra(n_heads, n_layers, VOCAB, base.model.embed_tokens, prefix=layer, **settings)


def medusa(n_heads: int, n_layers: int, blocks: str) -> Medusa:
    return Medusa(n_heads, n_layers, VOCAB, shared=blocks == "shared")


def randomise(module: nn.Module, seed: int = 1) -> nn.Module:
    """Weights large enough for SiLU to be nonlinear; the shared embedding stays."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.startswith("input_embed_fn"):
                noise = torch.randn(parameter.shape, generator=generator)
                is_norm = "norm" in name
                parameter.copy_(1 + 0.2 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)
    return module.eval()


@pytest.fixture(scope="module", params=["gqa"])
def base(request, llama_checkpoint) -> tuple[LlamaForCausalLM, BoundBase]:
    """The same base in both packages; 2 key-value heads for 4 heads unless parametrised."""
    directory = llama_checkpoint(num_key_value_heads={"gqa": 2, "mha": 4}[request.param])
    theirs = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return theirs, BoundBase(*load_llama(directory))


both_bases = pytest.mark.parametrize("base", ["gqa", "mha"], indirect=True)


def hydra_config(n_heads, n_layers, arch="mlp", grounded=True, **more) -> dict:
    return {
        "hydra_num_heads": n_heads,
        "hydra_num_layers": n_layers,
        "hydra_head_arch": arch,
        "grounded_heads": grounded,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "nowhere",
    } | more


def medusa_config(n_heads, n_layers) -> dict:
    return {"medusa_num_heads": n_heads, "medusa_num_layers": n_layers, "base_model_name_or_path": "nowhere"}


def release(directory: Path, state: dict, config: dict, suffix: str = ".pt") -> Path:
    """Save as the official code does: config.json and torch.save(state_dict), or the same as safetensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stem = "hydra_lm_head" if "hydra_num_heads" in config else "medusa_lm_head"
    if suffix == ".pt":
        torch.save(state, directory / f"{stem}.pt")
    else:  # which refuses tensors that share memory
        save_file({name: tensor.clone() for name, tensor in state.items()}, directory / f"{stem}.safetensors")
    return directory


def some_tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (2, 12))


def agrees(directory: Path, official: nn.Module, base, aux_hidden_states: torch.Tensor | None = None):
    """Check that our teacher-forced logits equal torch's on random hidden states; return the drafter."""
    _, bound = base
    drafter, params = load_draft(directory, bound.config)
    tokens = some_tokens()
    if aux_hidden_states is None:
        aux_hidden_states = torch.randn((2, 12, WIDTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = official(aux_hidden_states, torch.tensor(tokens)).numpy()
    assert 0.3 < expected.std() < 10
    ours = forced_logits(drafter, params, jnp.asarray(aux_hidden_states.numpy()), jnp.asarray(tokens), bound)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
    return drafter


# --- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layers", "blocks", "suffix"),
    [(1, "shared", ".pt"), (3, "shared", ".pt"), (3, "shared", ".safetensors"), (3, "separate", ".safetensors")],
)
def test_hydra(base, tmp_path, n_layers, blocks, suffix):
    official = randomise(hydra(base[0], 3, n_layers, grounded=True, blocks=blocks, prefix=False))
    directory = release(tmp_path, official.state_dict(), hydra_config(3, n_layers), suffix)
    drafter = agrees(directory, official, base)
    assert isinstance(drafter, HydraHeads)
    assert drafter.share_blocks == (blocks == "shared")


@pytest.mark.parametrize("blocks", ["shared", "separate"])
def test_ungrounded_hydra(base, tmp_path, blocks):
    official = randomise(hydra(base[0], 3, 2, grounded=False, blocks=blocks, prefix=False))
    drafter = agrees(release(tmp_path, official.state_dict(), hydra_config(3, 2, grounded=False)), official, base)
    assert isinstance(drafter, MedusaHeads)
    assert drafter.lm_head_bias


@both_bases
@pytest.mark.parametrize(("grounded", "blocks"), [(True, "shared"), (True, "separate"), (False, "shared")])
def test_prefix_layer(base, tmp_path, grounded, blocks):
    official = randomise(hydra(base[0], 2, 3, grounded=grounded, blocks=blocks, prefix=True))
    state = official.state_dict()
    # The released code runs transformers 4.36, which saves this buffer.
    state["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert "hydra_mlp.0.5.linear.weight" in state
    assert "hydra_lm_head.0.1.bias" in state
    directory = release(tmp_path, state, hydra_config(2, 3, "prefix-mlp", grounded))
    assert agrees(directory, official, base).prefix is not None


@pytest.mark.parametrize(
    ("n_layers", "blocks", "suffix"),
    [(1, "shared", ".pt"), (2, "separate", ".pt"), (2, "shared", ".safetensors")],
)
def test_medusa(base, tmp_path, n_layers, blocks, suffix):
    official = randomise(medusa(3, n_layers, blocks))
    assert f"2.{n_layers}.weight" in official.state_dict()
    drafter = agrees(release(tmp_path, official.state_dict(), medusa_config(3, n_layers), suffix), official, base)
    assert isinstance(drafter, MedusaHeads)
    assert not drafter.lm_head_bias


def test_medusa_file_with_more_heads_than_its_config_declares(base, tmp_path):
    official = randomise(medusa(5, 1, "shared"))
    assert agrees(release(tmp_path, official.state_dict(), medusa_config(2, 1)), official, base).num_draft_heads == 5


def test_medusa_heads_of_which_one_has_equal_blocks(base, tmp_path):
    """Blocks that are equal in one head only are not a shared block."""
    official = randomise(medusa(2, 3, "separate"))
    for layer in (1, 2):
        official[0][layer].load_state_dict(official[0][0].state_dict())
    assert not agrees(release(tmp_path, official.state_dict(), medusa_config(2, 3)), official, base).share_blocks


def test_blocks_that_differ_in_one_number(base, tmp_path):
    """Blocks are copies only if all numbers agree, also of the biases."""
    official = randomise(medusa(2, 2, "separate"))
    for head in official:
        head[1].load_state_dict(head[0].state_dict())
    with torch.no_grad():
        official[1][1].linear.bias[7] += 1.0
    assert not agrees(release(tmp_path, official.state_dict(), medusa_config(2, 2)), official, base).share_blocks


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_bfloat16_file(base, tmp_path, suffix):
    official = randomise(hydra(base[0], 2, 2, grounded=True, blocks="shared", prefix=False))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in official.state_dict().items()}
    rounded = {name: tensor.float() for name, tensor in state.items() if not name.startswith("input_embed_fn")}
    official.load_state_dict(rounded, strict=False)  # torch computes in float32 with the rounded weights
    agrees(release(tmp_path, state, hydra_config(2, 2), suffix), official, base)


def test_non_contiguous_tensors(base, tmp_path):
    """A transposed view in a .pt keeps its strides."""
    official = randomise(medusa(1, 1, "shared"))
    state = {name: t.mT.contiguous().mT if t.ndim == 2 else t for name, t in official.state_dict().items()}
    assert not state["0.1.weight"].is_contiguous()
    agrees(release(tmp_path, state, medusa_config(1, 1)), official, base)


def test_hidden_state_offset(base, tmp_path):
    """Offset 1 is the input of the last layer, transformers' hidden_states[-2]; not normed."""
    theirs, bound = base
    tokens = some_tokens()
    with torch.no_grad():
        states = theirs(torch.tensor(tokens), output_hidden_states=True).hidden_states
    official = randomise(hydra(theirs, 2, 1, grounded=True, blocks="shared", prefix=False))
    directory = release(tmp_path, official.state_dict(), hydra_config(2, 1, hidden_state_offset=1))
    drafter, params = load_draft(directory, bound.config)
    assert drafter.spec.aux_hidden_layers == (1,)

    positions = np.broadcast_to(np.arange(12), tokens.shape)
    forward = bound.forward(tokens, positions, causal_mask(12), aux_hidden_layers=drafter.spec.aux_hidden_layers)
    np.testing.assert_allclose(forward.aux_hidden_states, states[-2].numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(forward.hidden, states[-1].numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    with torch.no_grad():
        expected = official(states[-2], torch.tensor(tokens)).numpy()
    ours = forced_logits(drafter, params, forward.aux_hidden_states, jnp.asarray(tokens), bound)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)  # after the base, whose rounding is in it too


# --- what is refused ------------------------------------------------------------------------------------------


def refused(directory, base, *pieces: str) -> str:
    return refusal(lambda: load_draft(directory, base[1].config), "draft", *pieces)


@pytest.fixture(scope="module")
def hydra_state(base) -> dict:
    """The state dict of two grounded heads of one layer."""
    return dict(randomise(hydra(base[0], 2, 1, True, "shared", prefix=False)).state_dict())


@pytest.fixture(scope="module")
def medusa_state() -> dict:
    return dict(randomise(medusa(2, 1, "shared")).state_dict())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "key", ["hydra_mlp.1.0.res_connection.weight", "hydra_lm_head.1.bias", "hydra_lm_head.0.weight"]
)
def test_missing_tensor(base, hydra_state, tmp_path, key, suffix):
    state = {name: tensor for name, tensor in hydra_state.items() if name != key}
    refused(release(tmp_path, state, hydra_config(2, 1), suffix), base, f"missing tensor '{key}'")


def test_missing_medusa_head(base, medusa_state, tmp_path):
    """Heads 0 and 2 without 1."""
    state = {name.replace("1.", "2.", 1) if name.startswith("1.") else name: t for name, t in medusa_state.items()}
    refused(release(tmp_path, state, medusa_config(2, 1)), base, "missing tensors '1.0.linear.bias'")


def test_fewer_hydra_heads_than_declared(base, hydra_state, tmp_path):
    refused(release(tmp_path, hydra_state, hydra_config(3, 1)), base, "missing tensors 'hydra_lm_head.2.bias'")


def test_prefix_file_without_its_prefix_layer(base, tmp_path):
    official = hydra(base[0], 1, 1, True, "shared", prefix=True)
    state = {name: t for name, t in official.state_dict().items() if not name.startswith("prefix")}
    directory = release(tmp_path, state, hydra_config(1, 1, "prefix-mlp"))
    refused(directory, base, "missing tensors 'prefix_embeding_layer.layers.0.input_layernorm.weight'", "and 5 more")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_unexpected_tensor(base, hydra_state, tmp_path, suffix):
    state = hydra_state | {"hydra_mlp.0.1.linear.bias": torch.ones(WIDTH)}
    directory = release(tmp_path, state, hydra_config(2, 1), suffix)
    refused(directory, base, "unexpected tensor 'hydra_mlp.0.1.linear.bias'")


def test_more_hydra_heads_than_declared(base, hydra_state, tmp_path):
    directory = release(tmp_path, hydra_state, hydra_config(1, 1))
    refused(directory, base, "unexpected tensors 'hydra_lm_head.1.bias'")


def test_wrong_shape(base, hydra_state, tmp_path):
    state = hydra_state | {"hydra_mlp.1.0.linear.weight": torch.ones(WIDTH, 2 * WIDTH)}
    directory = release(tmp_path, state, hydra_config(2, 1))
    refused(directory, base, "hydra_mlp.1.0.linear.weight: got shape [32, 64], expected [32, 96]")


def test_medusa_1_layer_file_declared_as_2(base, medusa_state, tmp_path):
    refused(release(tmp_path, medusa_state, medusa_config(2, 2)), base, "missing tensor '0.2.weight'")


@pytest.mark.parametrize(
    ("change", "found"),
    [({"width": 64}, "width: got 32, expected 64"), ({"vocab_size": 97}, "vocabulary: got 96, expected 97")],
)
def test_heads_of_another_base(base, hydra_state, medusa_state, tmp_path, change, found):
    other = base[0], BoundBase(base[1].model.clone(config=base[1].config.replace(**change)), None)
    for name, state, config in (
        ("hydra", hydra_state, hydra_config(2, 1)),
        ("medusa", medusa_state, medusa_config(2, 1)),
    ):
        refused(release(tmp_path / name, state, config), other, "another base", found)


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        ({"hydra_head_arch": "eagle-attn"}, ("hydra_head_arch", "'eagle-attn'", "'mlp'", "'prefix-mlp'")),
        ({"hydra_head_arch": ["mlp"]}, ("hydra_head_arch", "mlp")),
        ({"hydra_num_heads": 0}, ("hydra_num_heads", "0")),
        ({"hydra_num_heads": "two"}, ("hydra_num_heads", "'two'")),
        ({"hydra_num_layers": True}, ("hydra_num_layers", "True")),
        ({"hydra_num_layers": None}, ("hydra_num_layers", "None")),
        ({"hidden_state_offset": -1}, ("hidden_state_offset", "-1")),
        ({"hidden_state_offset": 3}, ("hidden_state_offset", "3", "2 layers")),
    ],
)
def test_unsupported_config(base, hydra_state, tmp_path, change, pieces):
    refused(release(tmp_path, hydra_state, hydra_config(2, 1) | change), base, *pieces)


def test_config_of_neither_kind(base, tmp_path):
    (tmp_path / "config.json").write_text('{"num_heads": 2}')
    refused(tmp_path, base, "hydra_num_heads", "medusa_num_heads", "no draft heads of a supported", str(tmp_path))


def test_missing_files(base, hydra_state, tmp_path):
    refused(tmp_path / "nowhere", base, "no such directory", "nowhere")
    refused(tmp_path, base, "no such file", "config.json")
    directory = release(tmp_path, hydra_state, hydra_config(2, 1))
    (directory / "hydra_lm_head.pt").unlink()
    refused(directory, base, "neither", "hydra_lm_head.safetensors", "hydra_lm_head.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_truncated_file(base, hydra_state, tmp_path, suffix):
    path = release(tmp_path, hydra_state, hydra_config(2, 1), suffix) / f"hydra_lm_head{suffix}"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(tmp_path, base, str(path), "damaged")


def test_pt_without_torch(base, hydra_state, tmp_path, monkeypatch):
    """torch is optional: a .pt file without it is refused, a .safetensors file loads."""
    pt = release(tmp_path / "pt", hydra_state, hydra_config(2, 1))
    safe = release(tmp_path / "safe", hydra_state, hydra_config(2, 1), ".safetensors")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(pt, base, "hydra_lm_head.pt", ".pt and .bin files need torch: pip install 'hydrajax[torch]'")
    load_draft(safe, base[1].config)
