"""Loading heads of other programs: logits equal those of torch modules; plain bases and damaged files are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

import hydrajax
from helpers.forced import forced_logits
from helpers.released import WIDTH, refusal
from helpers.torch_heads import VOCAB, Medusa2, medusa_2_config, randomise, refused, save, vllm, vllm_config
from hydrajax import api, assets
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.formats import checkpoint
from hydrajax.formats.load import load_draft
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase

TOLERANCE = 1e-5  # relative to logits of magnitude 1 to 10
# What the message for a directory of no known kind must offer.
LOADS = ("hydra_lm_head", "medusa_lm_head", "medusa_head.", "model_type 'medusa'", "hydrajax_draft")


# --- the heads ------------------------------------------------------------------------------------------------


def agrees(drafter, params, official: nn.Module, base: BoundBase) -> None:
    """Our teacher-forced logits equal the torch module's on random hidden states."""
    aux_hidden_states = torch.randn((2, 12, WIDTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = official(aux_hidden_states).numpy()
    assert 0.3 < expected.std() < 10
    ours = forced_logits(drafter, params, jnp.asarray(aux_hidden_states.numpy()), jnp.zeros((2, 12), int), base)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


# --- Medusa-2: heads and base in one file --------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize(
    ("kind", "n_layers"), [("safetensors", 1), ("safetensors shards", 2), ("bin shards", 1), ("bin", 2)]
)
def test_medusa_2(base, base_state, base_config, tmp_path, kind, n_layers, declared):
    official = randomise(Medusa2(3, n_layers))
    assert f"medusa_head.2.{n_layers}.weight" in official.state_dict()
    config = medusa_2_config(base_config, 3, n_layers) if declared else base_config
    save(tmp_path, base_state | official.state_dict(), config, kind)
    drafter, params = load_draft(tmp_path, base.config)
    assert drafter == MedusaHeads(3, WIDTH, VOCAB, n_layers, share_blocks=n_layers == 1)
    agrees(drafter, params, official, base)


@pytest.mark.parametrize("kind", ["safetensors shards", "bin"])
def test_medusa_2_is_its_own_base(tiny_checkpoint, base_state, base_config, tmp_path, kind):
    """Both halves of one directory: transformers' hidden states in torch's heads give our logits."""
    official = randomise(Medusa2(2, 1))
    save(tmp_path, base_state | official.state_dict(), medusa_2_config(base_config, 2, 1), kind)
    loaded = api.load(tmp_path, tmp_path)
    plain = api.load(tiny_checkpoint)
    jax.tree.map(np.testing.assert_array_equal, loaded.params.base, plain.params.base)
    assert loaded.model == plain.model

    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 12))
    theirs = LlamaForCausalLM.from_pretrained(tiny_checkpoint, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = official(theirs(torch.tensor(tokens), output_hidden_states=True).hidden_states[-1]).numpy()
    bound = BoundBase(loaded.model, loaded.params.base)
    positions = np.broadcast_to(np.arange(12), tokens.shape)

    @jax.jit
    def logits(draft):
        base = bound.model.apply({"params": bound.params}, tokens, positions, causal_mask(12))
        return forced_logits(loaded.drafter, draft, base.aux_hidden_states, jnp.asarray(tokens), bound)

    ours = logits(loaded.params.draft)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)  # the base's rounding is in it too


def test_medusa_2_in_bfloat16_keeps_its_dtype(base, base_state, base_config, tmp_path):
    state = base_state | randomise(Medusa2(2, 1)).state_dict()
    save(tmp_path, {name: x.bfloat16() for name, x in state.items()}, base_config)
    drafter, params = load_draft(tmp_path, base.config, None)
    assert drafter.dtype == jnp.bfloat16
    expected = state["medusa_head.1.1.weight"].bfloat16().float().numpy().T
    np.testing.assert_array_equal(np.asarray(params["head_1"]["lm_kernel"], np.float32), expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


# --- vLLM's layout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_heads", "n_layers", "bias", "kind"),
    [
        (5, 1, False, "safetensors"),  # as released
        (2, 3, False, "safetensors"),
        (3, 1, True, "safetensors"),
        (2, 2, True, "safetensors shards"),
        (2, 1, False, "bin"),
    ],
)
def test_vllm_medusa(base, tmp_path, n_heads, n_layers, bias, kind):
    official = randomise(vllm(n_heads, n_layers, bias))
    config = vllm_config(n_heads, n_layers) | ({"medusa_fc_bias": True} if bias else {})
    drafter, params = load_draft(save(tmp_path, official.state_dict(), config, kind), base.config)
    assert isinstance(drafter, MedusaHeads)
    assert (drafter.num_draft_heads, drafter.n_layers, drafter.lm_head_bias) == (n_heads, n_layers, False)
    agrees(drafter, params, official, base)
    assert bool(jnp.any(params["head_0"]["blocks_0"]["bias"])) == bias


@pytest.mark.parametrize("equal", [True, False])
def test_vllm_blocks_that_are_copies_are_shared(base, tmp_path, equal):
    official = randomise(vllm(2, 3, bias=False))
    for block in official.blocks:
        for layer in block.layers[1:] if equal else block.layers[2:]:
            layer.load_state_dict(block.layers[0].state_dict())
    drafter, params = load_draft(save(tmp_path, official.state_dict(), vllm_config(2, 3)), base.config)
    assert drafter.share_blocks == equal
    agrees(drafter, params, official, base)


def test_vllm_vocabulary_truncated_to_itself(base, tmp_path):
    official = randomise(vllm(2, 1, bias=False))
    config = vllm_config(2, 1, truncated_vocab_size=VOCAB, original_lm_head=False)
    agrees(*load_draft(save(tmp_path, official.state_dict(), config), base.config), official, base)


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        ({"truncated_vocab_size": 48}, ("truncated_vocab_size", "48", str(VOCAB))),
        ({"original_lm_head": True}, ("original_lm_head", "True")),
        ({"num_heads": 0}, ("num_heads: got 0, expected an integer of at least 1",)),
        ({"num_heads": "5"}, ("num_heads", "'5'")),
        ({"num_heads": None}, ("num_heads", "None")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"num_heads": 10**9}, ("tensors: got 5", "1000000000 heads")),
        ({"num_hidden_layers": 10**9}, ("tensors: got 5", "1000000000 blocks")),
    ],
)
def test_vllm_config_that_is_not_supported(base, tmp_path, change, pieces):
    state = randomise(vllm(2, 1, bias=False)).state_dict()
    state["token_map"] = torch.arange(48)
    refused(save(tmp_path, state, vllm_config(2, 1) | change), base, *pieces)


def test_vllm_config_without_its_numbers(base, tmp_path):
    config = vllm_config(2, 1)
    del config["num_hidden_layers"]
    refused(save(tmp_path, randomise(vllm(2, 1, False)).state_dict(), config), base, "num_hidden_layers", "None")


# --- damaged files of both ------------------------------------------------------------------------------------


@pytest.fixture(params=["vllm", "medusa-2", "medusa-2 undeclared"])
def release(request, base_state, base_config, tmp_path):
    """``make(kind="safetensors", **tensors)``: two heads of one block with some tensors replaced, None for removed.

    Tensors are named by role: ``lm`` (head 0's), ``weight`` and ``bias`` (of head 1's block), ``extra``.
    """
    if request.param == "vllm":
        state, config = randomise(vllm(2, 1, True)).state_dict(), vllm_config(2, 1, medusa_fc_bias=True)
        stem = "blocks.1.layers.0"
        names = {"lm": "lm_heads.0.weight", "extra": "blocks.1.layers.1.weight"}
    else:
        state, config = base_state | randomise(Medusa2(2, 1)).state_dict(), dict(base_config)
        if request.param == "medusa-2":
            config = medusa_2_config(base_config, 2, 1)
        stem = "medusa_head.1.0.linear"
        names = {"lm": "medusa_head.0.1.weight", "extra": "medusa_head.1.7.weight"}
    names |= {"weight": f"{stem}.weight", "bias": f"{stem}.bias"}

    def make(kind: str = "safetensors", **tensors) -> Path:
        changed = state | {names[role]: tensor for role, tensor in tensors.items()}
        return save(tmp_path / "heads", {name: x for name, x in changed.items() if x is not None}, config, kind)

    make.names = names
    make.known = request.param != "medusa-2 undeclared"  # by its config.json, whatever its weights are
    return make


def test_undamaged(base, release):
    for kind in ("safetensors", "bin shards"):
        assert load_draft(release(kind), base.config)[0] == MedusaHeads(2, WIDTH, VOCAB, 1)


@pytest.mark.parametrize("kind", ["safetensors", "bin shards"])
@pytest.mark.parametrize("role", ["bias", "weight", "lm"])
def test_missing_tensor(base, release, role, kind):
    """Also if it is the first lm head, which the second head still has."""
    refused(release(kind, **{role: None}), base, f"missing tensor '{release.names[role]}'")


def test_unexpected_tensor(base, release):
    refused(release(extra=torch.ones(WIDTH, WIDTH)), base, f"unexpected tensor '{release.names['extra']}'")


@pytest.mark.parametrize(
    ("role", "shape"), [("weight", (WIDTH, 2 * WIDTH)), ("bias", (WIDTH + 1,)), ("weight", (WIDTH,)), ("bias", ())]
)
def test_wrong_shape(base, release, role, shape):
    pieces = f"{release.names[role]}: got shape {list(shape)}, expected {[WIDTH] * (1 + (role == 'weight'))}"
    refused(release(**{role: torch.ones(shape)}), base, pieces)


@pytest.mark.parametrize("shape", [(VOCAB + 1, WIDTH), (VOCAB, WIDTH // 2)])
def test_heads_of_another_size_of_base(base, release, shape):
    refused(release(lm=torch.ones(shape)), base, "made for another base", str((set(shape) - {VOCAB, WIDTH}).pop()))


@pytest.mark.parametrize("dtype", [jnp.float32, None], ids=["float32", "own"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(("role", "shape"), [("bias", (WIDTH,)), ("lm", (VOCAB, WIDTH))])
def test_tensor_that_holds_no_floats(base, release, role, shape, kind, dtype):
    """Also with the file's own dtype, which is taken from the first lm head."""
    directory = release(kind, **{role: torch.ones(shape, dtype=torch.int8)})
    refused(directory, base, f"{release.names[role]}: got dtype", "expected float64", dtype=dtype)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_truncated_file(base, release, kind):
    directory = release(kind)
    path = directory / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(directory, base, str(directory), *release.known * (str(path), "damaged"))


def test_missing_file(base, release):
    directory = release("safetensors shards")
    (directory / "model-00002-of-00003.safetensors").unlink()
    refused(directory, base, *release.known * ("shard model-00002-of-00003.safetensors", "missing from"))
    for path in directory.glob("model*"):
        path.unlink()
    refused(directory, base, *release.known * ("has neither",))


def test_medusa_2_head_that_is_not_there(base, base_state, base_config, tmp_path):
    """Heads 0 and 2 without 1."""
    heads = randomise(Medusa2(3, 1)).state_dict()
    state = base_state | {name: x for name, x in heads.items() if not name.startswith("medusa_head.1.")}
    config = medusa_2_config(base_config, 3, 1)
    refused(save(tmp_path, state, config), base, "missing tensors 'medusa_head.1.0.linear.bias'")


# --- EAGLE (the numbers are compared in tests/drafters) -------------------------------------------------------


def eagle_state(version: int) -> dict:
    """The tensors of released EAGLE-1/2 or EAGLE-3 heads."""
    layer, inputs = ("midlayer.", 2 * WIDTH) if version == 3 else ("layers.0.", WIDTH)
    attention = {f"{layer}self_attn.{part}_proj.weight": (WIDTH, inputs) for part in "qkv"}
    attention[f"{layer}self_attn.o_proj.weight"] = (WIDTH, WIDTH)
    mlp = {f"{layer}mlp.{part}_proj.weight": (88, WIDTH) for part in ("gate", "up")}
    shapes = attention | mlp | {f"{layer}mlp.down_proj.weight": (WIDTH, 88)}
    shapes[f"{layer}post_attention_layernorm.weight"] = (WIDTH,)
    if version == 3:
        shapes |= {f"{layer}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "hidden_norm")}
        shapes |= {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (VOCAB // 2, WIDTH)}
        maps = {"d2t": torch.arange(VOCAB // 2), "t2d": torch.arange(VOCAB) % 2 == 0}  # every other token
    else:
        shapes |= {"embed_tokens.weight": (VOCAB, WIDTH), "fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}
        maps = {}
    return {name: torch.ones(shape) for name, shape in shapes.items()} | maps


@pytest.fixture
def eagle(base, base_config, tmp_path):
    """``(write, config)``; ``write(version, state={}, without=(), **config)`` makes a released directory."""

    def write(version: int, *, state=None, without=(), kind="safetensors", **fields) -> Path:
        config = base_config | {"num_hidden_layers": 1, "num_key_value_heads": 4}
        if version == 3:
            config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB // 2}
        tensors = eagle_state(version) | (state or {})
        return save(tmp_path, {name: x for name, x in tensors.items() if name not in without}, config | fields, kind)

    return write, base.config


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_eagle_1_loads(eagle, kind):
    write, config = eagle
    drafter, params = load_draft(write(1, kind=kind), config, None)
    assert type(drafter) is Eagle
    assert (drafter.config.width, drafter.config.mlp_width, drafter.config.n_kv_heads) == (WIDTH, 88, 4)
    assert drafter.fc_bias
    assert jax.tree.map(jnp.shape, params)["fc"] == (2 * WIDTH, WIDTH)
    without = load_draft(write(1, without=("fc.bias", "embed_tokens.weight"), bias=False), config)
    assert not without[0].fc_bias
    assert "fc_bias" not in without[1]


def test_eagle_3_loads_with_its_vocabulary(eagle):
    write, config = eagle
    config = config.replace(n_layers=8)
    drafter, params = load_draft(write(3), config, jnp.bfloat16)
    assert type(drafter) is Eagle3
    assert drafter.spec.aux_hidden_layers == (6, 4, 3)  # the inputs of layers 2, 4 and 5
    assert drafter.vocabulary.tokens.tolist() == list(range(0, VOCAB, 2))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {drafter.dtype} == {jnp.dtype(jnp.bfloat16)}
    everything = {"lm_head.weight": torch.ones(VOCAB, WIDTH)}
    drafter, _ = load_draft(write(3, state=everything, without=("d2t", "t2d"), draft_vocab_size=VOCAB), config)
    assert drafter.vocabulary is None


@pytest.mark.parametrize(
    ("version", "changes", "pieces"),
    [
        (1, {"without": ["fc.weight"]}, ("missing tensor 'fc.weight'",)),
        (1, {"without": ["fc.bias"]}, ("missing tensor 'fc.bias'",)),
        (1, {"bias": False}, ("unexpected tensor 'fc.bias'",)),
        (1, {"bias": "no"}, ("config.json: bias: got 'no', expected true or false",)),
        (1, {"state": {"fc.weight": torch.ones(WIDTH, WIDTH)}}, ("fc.weight: got shape [32, 32], expected [32, 64]",)),
        (1, {"hidden_size": 2 * WIDTH}, ("made for another base", "width: got 64, expected 32")),
        (
            1,
            {"state": {"embed_tokens.weight": torch.ones(7, WIDTH)}},
            ("vocabulary: got 7, expected 96",),
        ),
        (1, {"num_hidden_layers": 2}, ("num_hidden_layers: got 2, expected 1 in an EAGLE draft",)),
        (1, {"state": {"layers.1.mlp.up_proj.weight": torch.ones(88, WIDTH)}}, ("unexpected tensor 'layers.1.mlp",)),
        (1, {"num_attention_heads": 0}, ("config.json", "num_attention_heads")),
        (3, {"without": ["d2t"]}, ("missing tensor 'd2t'",)),
        (3, {"without": ["midlayer.hidden_norm.weight"]}, ("missing tensor 'midlayer.hidden_norm.weight'",)),
        (3, {"state": {"d2t": torch.zeros(VOCAB // 2)}}, ("d2t: got float32 [48], expected int64 [48]",)),
        (3, {"state": {"d2t": -torch.arange(VOCAB // 2)}}, ("d2t: expected increasing token ids",)),
        (3, {"state": {"d2t": torch.full((VOCAB // 2,), VOCAB)}}, ("d2t: ", f"to {VOCAB - 1}")),
        (3, {"draft_vocab_size": VOCAB + 1}, ("draft_vocab_size", "at most")),
        (3, {"draft_vocab_size": 0}, ("draft_vocab_size: got 0, expected an integer of at least 1",)),
        (3, {"draft_vocab_size": VOCAB}, ("lm_head.weight: got shape",)),
    ],
)
def test_eagle_files_that_are_wrong(eagle, version, changes, pieces):
    write, config = eagle
    directory = write(version, **changes)
    refusal(lambda: load_draft(directory, config.replace(n_layers=8)), "draft", str(directory), *pieces)


@pytest.mark.parametrize("n_layers", [2, 5])
def test_eagle_3_for_a_base_without_three_layers_to_read(eagle, n_layers):
    write, config = eagle
    directory = write(3)
    refusal(lambda: load_draft(directory, config.replace(n_layers=n_layers)), "draft", f"got {n_layers} layers")


# --- what is no draft -------------------------------------------------------------------------------------------


def test_a_plain_base_is_no_draft(base, tiny_checkpoint):
    refused(tiny_checkpoint, base, str(tiny_checkpoint), "no draft heads of a supported format", *LOADS)


@pytest.mark.parametrize("config", ["{}", '{"model_type": ["medusa"]}', '{"model_type": null, "hydrajax": 3}'])
def test_a_directory_of_nothing_known(base, tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    refused(tmp_path, base, "no draft heads of a supported format", *LOADS)


@pytest.mark.parametrize("content", ["", "[]", '"medusa"', '{"model_type": ', "\x00"])
def test_config_that_is_no_object(base, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, base, "config.json")


@pytest.mark.parametrize("beside_base", [True, False])
def test_medusa_without_lm_heads(base, base_state, base_config, tmp_path, beside_base):
    """Medusa's version 2 of config.json: every head has the base's lm head."""
    state = randomise(Medusa2(2, 1)).state_dict()
    state = {name: x for name, x in state.items() if "linear" in name}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    if beside_base:
        save(tmp_path, base_state | state, base_config | config)
    else:
        save(tmp_path, {}, config)
        (tmp_path / "model.safetensors").unlink()
        heads = {name.removeprefix("medusa_head."): x.clone() for name, x in state.items()}
        save_file(heads, tmp_path / "medusa_lm_head.safetensors")
    refused(tmp_path, base, str(tmp_path), "share the base's lm head", "version 2")


def test_bin_without_torch(base, base_state, base_config, tmp_path, monkeypatch):
    state = base_state | randomise(Medusa2(2, 1)).state_dict()
    save(tmp_path, state, medusa_2_config(base_config, 2, 1), "bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(tmp_path, base, "pytorch_model.bin", "files need torch: pip install")


def test_each_configuration_is_read_once(monkeypatch):
    read, names = checkpoint.read_json, []
    monkeypatch.setattr(checkpoint, "read_json", lambda path, what: names.append(str(path)) or read(path, what))
    hydrajax.load("shipped", "hydra++")
    configs = [name for name in names if name.endswith("config.json") and "generation" not in name]
    assert configs == [str(assets.path(name) / "config.json") for name in ("base", "hydra_pp")]
