"""Exports for other programs: torch modules of the papers' formulas load them by name and give our logits, and every
chain of formats keeps every bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig as HFConfig

from helpers.draft_heads import VOCAB, WIDTH, config_in, heads_of, random_params
from helpers.forced import forced_logits
from helpers.released import Hydra, Medusa, VLLMMedusa, one_layer, refusal
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.formats.export import FORMATS, export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase

TOLERANCE = 1e-5  # relative to logits of magnitude 1 to 10


# --- what vLLM makes of a configuration ------------------------------------------------------------------------


def parsed_by_vllm(config: dict) -> dict:
    """vllm/transformers_utils/configs/medusa.py: its defaults, and names with these words are aliases."""
    config = dict(config)
    for name in list(config):
        if "num" in name:
            if "heads" in name:
                config["num_heads"] = config.pop(name)
            elif "layers" in name:
                config["num_hidden_layers"] = config.pop(name)
    defaults = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}
    config = defaults | {"truncated_vocab_size": None, "architectures": ["MedusaModel"]} | config
    if config["truncated_vocab_size"] is None:
        config["truncated_vocab_size"] = config["vocab_size"]
    return config


def vllm_module(config: dict) -> VLLMMedusa:
    """The module that vLLM builds for a parsed configuration."""
    assert config["truncated_vocab_size"] in (None, config["vocab_size"])  # or it wants a token_map
    assert config["hidden_size"] == WIDTH
    assert not config.get("original_lm_head", False)
    assert config.get("logit_scale", 1.0) == 1.0
    bias = config.get("medusa_fc_bias", False)
    return VLLMMedusa(config["num_heads"], config["num_hidden_layers"], config["vocab_size"], bias=bias)


# --- our side -------------------------------------------------------------------------------------------------


def official_module(drafter, base) -> nn.Module:
    """The torch module of these heads before loading."""
    heads, prefix = drafter, None
    if drafter.prefix is not None:
        c = drafter.prefix.config
        config = HFConfig(
            vocab_size=VOCAB,
            hidden_size=c.width,
            intermediate_size=c.mlp_width,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        )
        prefix = one_layer(config)
        prefix.embed_tokens = nn.Identity()  # the released file's is a copy of the base's
    if isinstance(heads, MedusaHeads) and not heads.lm_head_bias:
        return Medusa(heads.num_draft_heads, heads.n_layers, VOCAB)
    embedding = torch.tensor(np.asarray(base[1]["embedding"]))
    settings = {"grounded": isinstance(heads, HydraHeads), "prefix": prefix}
    return Hydra(heads.num_draft_heads, heads.n_layers, VOCAB, lambda tokens: embedding[tokens], **settings)


def agrees(official: nn.Module, drafter, params, base) -> None:
    """Our teacher-forced logits equal torch's on random hidden states."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, 10))
    aux_hidden_states = np.random.default_rng(5).standard_normal((2, 10, WIDTH)).astype(np.float32)
    with torch.no_grad():
        theirs = official.eval()(torch.tensor(aux_hidden_states), torch.tensor(tokens)).numpy()
    assert 0.3 < theirs.std() < 10
    logits = jax.jit(lambda params: forced_logits(drafter, params, aux_hidden_states, tokens, BoundBase(*base)))
    ours = logits(params)
    np.testing.assert_allclose(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


# --- what the official code computes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n_layers", "share"),
    [
        ("hydra", 1, True),
        ("hydra", 3, True),
        ("hydra", 3, False),
        ("hydra++", 4, True),
        ("ungrounded", 2, True),
        ("ungrounded++", 2, False),
        ("medusa", 1, True),
        ("medusa", 3, False),
        ("medusa", 2, True),
    ],
)
def test_official_modules_compute_our_logits(tiny_model, tmp_path, kind, n_layers, share):
    drafter = heads_of(kind, tiny_model[0].config, n_layers=n_layers, share_blocks=share)
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path, drafter, params, dtype=jnp.float32, torch_file=True)
    stem = "medusa_lm_head" if kind == "medusa" else "hydra_lm_head"
    official = official_module(drafter, tiny_model)
    state = torch.load(tmp_path / f"{stem}.pt", weights_only=True)
    official.load_state_dict(state, strict=True)
    agrees(official, drafter, params, tiny_model)

    again = load_file(tmp_path / f"{stem}.safetensors")
    official_module(drafter, tiny_model).load_state_dict(again, strict=True)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_files_hold_what_torch_rounds_to(tiny_model, tmp_path, dtype):
    drafter = heads_of("medusa")
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path, drafter, params, dtype=dtype, torch_file=True)
    theirs = torch.bfloat16 if dtype == jnp.bfloat16 else torch.float16
    expected = torch.tensor(np.asarray(params["head_2"]["lm_kernel"]).T.copy()).to(theirs)
    pt, safe = torch.load(tmp_path / "medusa_lm_head.pt"), load_file(tmp_path / "medusa_lm_head.safetensors")
    for state in (pt, safe):
        assert {tensor.dtype for tensor in state.values()} == {theirs}
        assert torch.equal(state["2.1.weight"], expected)


def test_what_the_official_hydra_code_and_config_need(tiny_model, tmp_path):
    """hydra_num_heads, hydra_num_layers, hydra_head_arch, grounded_heads of the released config.json."""
    drafter = heads_of("hydra++", tiny_model[0].config, n_layers=4, hidden_state_offset=1)
    export_heads(tmp_path, drafter, random_params(drafter, tiny_model), base_name="lab/tiny")
    expected = {
        "hydra_num_heads": 3,
        "hydra_num_layers": 4,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 1,
        "base_model_name_or_path": "lab/tiny",
    }
    assert expected.items() <= config_in(tmp_path).items()


def test_what_text_generation_inference_needs(tiny_model, tmp_path):
    """It needs a file name and the heads' fields; ``architectures`` would mean a whole model."""
    drafter = heads_of("medusa", n_layers=2)
    export_heads(tmp_path, drafter, random_params(drafter, tiny_model), base_name="lab/tiny")
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["medusa_lm_head.safetensors"]
    config = config_in(tmp_path)
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)
    assert config["base_model_name_or_path"] == "lab/tiny"
    assert "architectures" not in config
    assert "model_type" not in config
    for k in range(3):  # server/text_generation_server/layers/medusa.py reads these
        names = [f"{k}.{i}.linear.{part}" for i in range(2) for part in ("weight", "bias")] + [f"{k}.2.weight"]
        assert set(names) <= load_file(tmp_path / "medusa_lm_head.safetensors").keys()


@pytest.mark.parametrize(("n_heads", "n_layers", "share"), [(3, 1, True), (2, 3, False), (2, 2, True)])
def test_what_vllm_needs(tiny_model, tmp_path, n_heads, n_layers, share):
    """Names and shapes of vllm/model_executor/models/medusa.py, fields of vllm/transformers_utils/configs/medusa.py."""
    drafter = heads_of("medusa", num_draft_heads=n_heads, n_layers=n_layers, share_blocks=share)
    params = random_params(drafter, tiny_model)
    mark = {"sha256": "0", "shapes": {"n_heads": 4, "n_layers": 7}}
    story = {"data": "some texts", "recipe": "num_layers of heads", "tokens_per_step": 2.5}
    more = {"base_name": "lab/tiny", "base_fingerprint": mark, "story": story}
    export_heads(tmp_path, drafter, params, format="vllm-medusa", dtype=jnp.float32, torch_file=True, **more)

    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    state = load_file(tmp_path / "model.safetensors")
    shapes = {f"blocks.{k}.layers.{i}.weight": [WIDTH, WIDTH] for k in range(n_heads) for i in range(n_layers)}
    shapes |= {f"blocks.{k}.layers.{i}.bias": [WIDTH] for k in range(n_heads) for i in range(n_layers)}
    shapes |= {f"lm_heads.{k}.weight": [VOCAB, WIDTH] for k in range(n_heads)}
    assert {name: list(tensor.shape) for name, tensor in state.items()} == shapes

    config = config_in(tmp_path)
    fields = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "num_heads": n_heads,
        "num_hidden_layers": n_layers,
        "truncated_vocab_size": VOCAB,
        "medusa_fc_bias": True,
    }
    assert fields.items() <= config.items()
    for word, field in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        assert [name for name in config if "num" in name and word in name] == [field]
    parsed = parsed_by_vllm(config)
    assert fields.items() <= parsed.items()
    official = vllm_module(parsed)
    official.load_state_dict(state, strict=True)
    agrees(official, drafter, params, tiny_model)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_vllms_config_names_the_dtype_of_the_file(tiny_model, tmp_path, dtype):
    """As transformers and vLLM understand ``torch_dtype``."""
    drafter = heads_of("medusa")
    export_heads(tmp_path, drafter, random_params(drafter, tiny_model), format="vllm-medusa", dtype=dtype)
    assert config_in(tmp_path)["torch_dtype"] == jnp.dtype(dtype).name


# --- chains ---------------------------------------------------------------------------------------------------


def through(chain, folder: Path, state: dict, config: dict, base) -> Path:
    """Files of a torch module, loaded and written once per format; the last directory."""
    at = folder / "start"
    at.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, at / f"{chain[0]}_lm_head.safetensors")
    (at / "config.json").write_text(json.dumps(config))
    for step, format in enumerate(chain[1:]):
        drafter, params = load_draft(at, base.config, None)
        at = folder / f"{step}-{format}"
        export_heads(at, drafter, params, format=format, dtype=None)
    return at


def with_random_bits(module: nn.Module, dtype: torch.dtype) -> dict:
    """A state of random finite numbers of all sizes, including subnormal ones and negative zeros."""
    random, state = np.random.default_rng(7), {}
    for name, tensor in module.state_dict().items():
        bits = random.integers(0, 256, (*tensor.shape, dtype.itemsize), np.uint8)
        numbers = torch.from_numpy(bits).view(dtype)[..., 0]
        state[name] = torch.where(torch.isfinite(numbers), numbers, -torch.zeros_like(numbers))
    return state


def bit_for_bit(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        numbers = [x.contiguous().flatten().view(torch.uint8) for x in (tensor, other[name])]
        assert torch.equal(*numbers), name


@pytest.mark.parametrize(("n_layers", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (2, torch.float16)])
def test_medusa_through_every_format(tiny_model, tmp_path, n_layers, dtype):
    state = with_random_bits(Medusa(3, n_layers, VOCAB), dtype)
    config = {"medusa_num_heads": 3, "medusa_num_layers": n_layers}
    chain = ("medusa", "vllm-medusa", "native", "medusa", "native", "vllm-medusa", "medusa")
    last = through(chain, tmp_path, state, config, tiny_model[0])
    bit_for_bit(load_file(last / "medusa_lm_head.safetensors"), state)
    assert config.items() <= config_in(last).items()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("hydra++", torch.float32), ("hydra++", torch.bfloat16), ("ungrounded", torch.float16)]
)
def test_hydra_through_native(tiny_model, tmp_path, kind, dtype):
    drafter = heads_of(kind, tiny_model[0].config, n_layers=3)
    state = with_random_bits(official_module(drafter, tiny_model), dtype)
    config = {
        "hydra_num_heads": 3,
        "hydra_num_layers": 3,
        "hydra_head_arch": "prefix-mlp" if kind.endswith("++") else "mlp",
        "grounded_heads": kind.startswith("hydra"),
        "hidden_state_offset": 1,
    }
    last = through(("hydra", "native", "hydra", "native", "hydra"), tmp_path, state, config, tiny_model[0])
    bit_for_bit(load_file(last / "hydra_lm_head.safetensors"), state)
    assert config.items() <= config_in(last).items()


def test_a_shared_block_stays_shared(tiny_model, tmp_path):
    """Other formats write it once per application, ours once."""
    medusa = Medusa(2, 3, VOCAB)
    for head in medusa:
        for layer in (1, 2):
            head[layer].load_state_dict(head[0].state_dict())
    config = {"medusa_num_heads": 2, "medusa_num_layers": 3}
    chain = ("medusa", "native", "vllm-medusa", "native", "medusa")
    last = through(chain, tmp_path, medusa.state_dict(), config, tiny_model[0])
    bit_for_bit(load_file(last / "medusa_lm_head.safetensors"), medusa.state_dict())
    for step in (0, 2):
        assert config_in(tmp_path / f"{step}-native")["drafter"]["settings"]["share_blocks"] is True


def test_vllm_heads_without_biases_get_zeros(tiny_model, tmp_path):
    """As released for vLLM; other formats always have biases."""
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "hidden_size": WIDTH, "vocab_size": VOCAB}
    state = vllm_module(parsed_by_vllm(config)).state_dict()
    assert not any(name.endswith("bias") for name in state)
    (tmp_path / "start").mkdir()
    save_file(state, tmp_path / "start" / "model.safetensors")
    (tmp_path / "start" / "config.json").write_text(json.dumps(config))
    drafter, params = load_draft(tmp_path / "start", tiny_model[0].config, None)
    export_heads(tmp_path / "medusa", drafter, params, format="medusa", dtype=None)
    found = load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors")
    expected = {f"{k}.0.linear.weight": state[f"blocks.{k}.layers.0.weight"] for k in range(2)}
    expected |= {f"{k}.1.weight": state[f"lm_heads.{k}.weight"] for k in range(2)}
    expected |= {f"{k}.0.linear.bias": torch.zeros(WIDTH) for k in range(2)}
    bit_for_bit(found, expected)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "kind", "pieces"),
    [
        ("medusa", "hydra", ("HydraHeads", "MedusaHeads without lm_head_bias")),
        ("medusa", "hydra++", ("HydraHeads with a prefix layer",)),
        ("medusa", "ungrounded", ("MedusaHeads with lm_head_bias",)),
        ("medusa", "medusa++", ("MedusaHeads with a prefix layer",)),
        ("vllm-medusa", "hydra", ("HydraHeads",)),
        ("vllm-medusa", "hydra++", ("HydraHeads with a prefix layer",)),
        ("vllm-medusa", "ungrounded++", ("MedusaHeads with a prefix layer with lm_head_bias",)),
        ("vllm-medusa", "medusa++", ("MedusaHeads with a prefix layer",)),
        ("hydra", "medusa", ("MedusaHeads without lm_head_bias", "Hydra heads")),
        ("hydra", "medusa++", ("MedusaHeads with a prefix layer without lm_head_bias",)),
        ("swan", "hydra", ("'swan'", *FORMATS)),
        ("eagle", "hydra", ("drafter: got HydraHeads, expected Eagle")),
        ("speculators", "medusa", ("drafter: got MedusaHeads, expected Eagle3")),
        ("", "hydra", ("''", *FORMATS)),
    ],
)
def test_formats_that_cannot_express_it(tiny_model, tmp_path, format, kind, pieces):
    refused(tmp_path, heads_of(kind, tiny_model[0].config), format, *pieces)


@pytest.mark.parametrize("format", ["medusa", "vllm-medusa"])
def test_medusas_formats_have_no_offset(tmp_path, format):
    refused(tmp_path, heads_of("medusa", hidden_state_offset=1), format, "hidden_state_offset", "1", "0")


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_no_heads_at_all(tmp_path, format):
    refused(tmp_path, NoDrafter(), format, "NoDrafter", "HydraHeads", "MedusaHeads")


def refused(folder: Path, drafter, format, *pieces: str) -> None:
    """The export fails and leaves no files."""
    refusal(lambda: export_heads(folder / "heads", drafter, {}, format=format), "export", *pieces)
    assert list(folder.iterdir()) == []
