"""EAGLE drafts in the layouts of vLLM, SGLang and speculators, variants that are refused, and official drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.draft_heads import identical
from helpers.released import refusal
from helpers.torch_eagle import Eagle1
from helpers.torch_eagle import Eagle3 as TorchEagle3
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.llama_config import LlamaConfig

BASE = LlamaConfig(61, 32, 80, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 61,
}
NESTED = {"model_type": "eagle", "model": TINY}  # vLLM's
FIELDS = {"speculators_model_type": "eagle3", "norm_before_residual": False, "draft_vocab_size": 20}


def tensors_of(version: int, **settings) -> dict:
    """Tensors of plain torch modules; EAGLE-3 drafts every third token."""
    c = BASE.replace(n_layers=1, mlp_width=48)
    torch.manual_seed(0)
    if version == 1:
        return Eagle1(c, settings.pop("bias", False), **settings).state_dict()
    state = TorchEagle3(c, 3, 20, **settings).state_dict()
    state["d2t"] = 2 * torch.arange(20)
    return state | {"t2d": (torch.arange(61) % 3 == 0) & (torch.arange(61) < 60)}


def save(folder: Path, config: dict, state: dict) -> Path:
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def speculators_1(state: dict) -> dict:
    names = {"fc": "fusion_fc", "layers.0": "transformer"}
    return {re.sub("^(fc|layers.0)", lambda found: names[found[0]], name): x for name, x in state.items()}


COPIES = {"embed_tokens.weight": torch.ones(61, 32), "lm_head.weight": torch.ones(61, 32)}  # of the base's
ONE, THREE = tensors_of(1), tensors_of(3)
RENAMED, BIASED = tensors_of(3, released=False), tensors_of(1, bias=True)
LAYOUTS = {  # config.json, tensors, and what they are released as
    "vLLM's own": (NESTED | {"architectures": ["EAGLEModel"]}, ONE | COPIES, ONE),
    "vLLM's own, truncated to all": (NESTED | {"truncated_vocab_size": 61}, ONE, ONE),
    "vLLM's own with a bias": (NESTED | {"bias": True}, BIASED, BIASED),
    "vLLM's own with its bias by the later name": (NESTED | {"eagle_fc_bias": True, "bias": False}, BIASED, BIASED),
    "vLLM's own, outer fields": (
        NESTED | {"model": TINY | {"intermediate_size": 7}, "intermediate_size": 48},
        ONE,
        ONE,
    ),
    "vLLM's own EAGLE-3": (NESTED | {"draft_vocab_size": 20, "method": "eagle3"}, THREE, THREE),
    "vLLM's name of the layer": (TINY | {"draft_vocab_size": 20}, RENAMED, THREE),
    "speculators": (FIELDS | {"transformer_layer_config": TINY}, RENAMED, THREE),
    "speculators with copies": (
        FIELDS | {"transformer_layer_config": TINY},
        RENAMED | {"embed_tokens.weight": COPIES["embed_tokens.weight"], "verifier_lm_head.weight": torch.ones(20, 32)},
        THREE,
    ),
    "speculators EAGLE-1": (
        {"speculators_model_type": "eagle", "transformer_layer_config": TINY, "layernorms": False},
        speculators_1(ONE),
        ONE,
    ),
    "speculators EAGLE-1 with a bias": (
        {"speculators_model_type": "eagle", "transformer_layer_config": TINY, "fusion_bias": True},
        speculators_1(BIASED),
        BIASED,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_hold_the_released_tensors(tmp_path, name):
    config, state, released = LAYOUTS[name]
    (tmp_path / "theirs").mkdir()
    drafter, params = load_draft(save(tmp_path / "theirs", config, state), BASE, None)
    assert drafter.config.mlp_width == 48
    export_heads(tmp_path / "ours", drafter, params, dtype=None)
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == released.keys()
    assert all(torch.equal(found[key], released[key]) for key in found)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, [0, 3, 7]),  # vLLM: if idx in aux_hidden_state_layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, [2, 4, 5]),  # SGLang: val + 1
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 6], "use_aux_hidden_state": True}}, [0, 3, 7]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_last_layernorm": True}}, [2, 4, 5]),
    ],
)
def test_layers_are_numbered_as_vllm_or_as_sglang_does(tmp_path, fields, layers):
    drafter, _ = load_draft(save(tmp_path, TINY | {"draft_vocab_size": 20} | fields, THREE), BASE)
    assert [8 - place for place in drafter.spec.aux_hidden_layers] == layers
    assert drafter.vocabulary.tokens.tolist() == list(range(0, 60, 3))


ONE_FIELDS = {"speculators_model_type": "eagle", "transformer_layer_config": TINY}
LAYERS = "eagle_aux_hidden_state_layer_ids"
REFUSED = [  # fields over a plain config.json of the layout, further tensors, the message
    # of speculators' EAGLE-3: variants that compute something else, each by its field
    ("speculators", {"norm_before_residual": None}, {}, "norm_before_residual: got None, expected true or false"),
    ("speculators", {"norm_before_fc": True}, {}, "norm_before_fc: got True"),
    ("speculators", {"fc_norm": True}, {}, "fc_norm: got True"),
    ("speculators", {"norm_output": True}, {}, "norm_output: got True"),
    ("speculators", {"embed_requires_grad": True}, {}, "embed_requires_grad: got True"),
    ("speculators", {"target_hidden_size": 64}, {}, "target_hidden_size: got 64, expected 32"),
    ("speculators", {"draft_vocab_size": None}, {}, "draft_vocab_size: got None, expected an integer"),
    ("speculators", {"speculators_model_type": "medusa"}, {}, "speculators_model_type: got 'medusa'"),
    ("speculators", {"transformer_layer_config": None}, {}, "transformer_layer_config: got None, expected an object"),
    ("speculators", {"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config: got 'fp8'"),
    ("speculators", {"layer": {"model_type": "qwen3"}}, {}, "transformer_layer_config: model_type: got 'qwen3'"),
    ("speculators", {"layer": {"num_hidden_layers": 2}}, {}, "transformer_layer_config: num_hidden_layers: got 2"),
    ("speculators", {"layer": {"attention_bias": True}}, {}, "transformer_layer_config: attention_bias: got True"),
    ("speculators", {"layer": {"layer_types": ["sliding_attention"]}}, {}, "layer_types: got ['sliding_attention']"),
    ("speculators", {"layer": {"partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor: got 0.5"),
    (
        "speculators",
        {"layer": {"hidden_size": 64}},
        {},
        "width: got 64, expected 32; the heads were made",
    ),
    (
        "speculators",
        {"layer": {"vocab_size": 62}},
        {},
        "vocabulary: got 62, expected 61; the heads",
    ),
    ("speculators", {}, {"mask_hidden": torch.ones(96)}, "unexpected tensor 'mask_hidden'"),
    # layers that the base does not have, or does not read in this order
    (
        "speculators",
        {LAYERS: [2, 4, 8]},
        {},
        "expected increasing numbers from 0 to 7 for this base of 8",
    ),
    ("speculators", {LAYERS: [4, 2, 5]}, {}, "got [4, 2, 5], expected increasing numbers"),
    ("speculators", {LAYERS: "2"}, {}, "eagle_aux_hidden_state_layer_ids: got '2'"),
    ("speculators", {LAYERS: [2, 4]}, {}, "fc.weight: got shape [32, 96], expected [32, 64]"),
    (
        "released",
        {"eagle_config": {LAYERS: [2, 4, 7]}},
        {},
        f"eagle_config.{LAYERS}: got [2, 4, 7], expected increasing",
    ),
    ("released", {LAYERS: [2, 4, 5], "eagle_config": {LAYERS: [1, 3, 4]}}, {}, f"both {LAYERS} and eagle_config."),
    # of EAGLE-3 as released
    ("released", {"norm_before_residual": 1}, {}, "norm_before_residual: got 1, expected true or false"),
    ("released", {"norm_output": True}, {}, "norm_output: got True"),
    (
        "released",
        {"eagle_config": {"use_aux_hidden_state": False}},
        {},
        "use_aux_hidden_state: got False",
    ),
    ("released", {"eagle_config": 3}, {}, "eagle_config: got 3, expected an object"),
    ("released", {}, {"t2d": torch.arange(61) < 20}, "t2d: got other tokens than in d2t"),
    ("released", {}, {"t2d": torch.arange(60) < 20}, "t2d: got BOOL [60], expected bool [61]"),
    # of EAGLE-1
    ("speculators 1", {"layernorms": True}, {}, "layernorms: got True"),
    ("speculators 1", {"fusion_bias": "yes"}, {}, "fusion_bias: got 'yes', expected true or false"),
    ("speculators 1", {"fusion_bias": True}, {}, "missing tensor 'fusion_fc.bias'"),
    ("nested", {"model": None}, {}, "model: got None, expected an object for model_type 'eagle'"),
    ("nested", {"model": {}}, {}, "field 'num_attention_heads' is missing"),
    ("nested", {"truncated_vocab_size": 30}, {}, "truncated_vocab_size: got 30, expected 61"),
    ("nested", {"add_para_norm": True}, {}, "add_para_norm: got True"),
    ("nested", {}, {"fc.bias": torch.ones(32)}, "unexpected tensor 'fc.bias'"),
    ("nested", {}, {"layers.0.input_layernorm.weight": torch.ones(32)}, "unexpected tensor 'layers.0.input_layernorm"),
    ("nested", {}, {"lm_head.weight": torch.ones(20, 32)}, "vocabulary: got 20, expected 61"),
]
PLAIN = {
    "speculators": (FIELDS | {"transformer_layer_config": TINY}, RENAMED),
    "released": (TINY | {"draft_vocab_size": 20}, THREE),
    "speculators 1": (ONE_FIELDS, speculators_1(ONE)),
    "nested": (NESTED, ONE),
}


@pytest.mark.parametrize(("layout", "fields", "more", "message"), REFUSED)
def test_what_is_not_computed_here_is_refused_by_its_name(tmp_path, layout, fields, more, message):
    config, state = PLAIN[layout]
    fields = dict(fields)
    layer = {"transformer_layer_config": TINY | fields.pop("layer")} if "layer" in fields else {}
    save(tmp_path, config | fields | layer, state | more)
    refusal(lambda: load_draft(tmp_path, BASE), "draft", str(tmp_path), message)


def test_vllms_own_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NESTED))
    with pytest.raises(HydrajaxError, match="no draft heads of a supported format"):
        load_draft(tmp_path, BASE)


# --- the drafts of the official code --------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["eagle1_mha", "eagle3_mha"])
def test_official_drafts_are_written_again(golden, tmp_path, arch):
    """The export equals the official file without the embedding, and every chain of formats keeps it."""
    source = golden / "eagle" / arch / "draft"
    raw = json.loads((golden / "base" / "mha" / "config.json").read_text())
    base = LlamaConfig(
        raw["vocab_size"], raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"],
        raw["num_attention_heads"], raw["num_key_value_heads"], 16, raw["max_position_embeddings"],
    )  # fmt: skip
    drafter, params = load_draft(source, base, None)
    official = load_file(source / "model.safetensors")
    official.pop("embed_tokens.weight", None)
    for format in (None, "speculators", "native"):
        export_heads(tmp_path / str(format), drafter, params, format=format, dtype=None)
        found, again = load_draft(tmp_path / str(format), base, None)
        assert found == drafter
        identical(params, again)
    written = load_file(tmp_path / "None" / "model.safetensors")
    assert written.keys() == official.keys()
    for name, tensor in official.items():
        assert tensor.dtype == written[name].dtype
        np.testing.assert_array_equal(tensor, written[name])
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "None"))
    unsaid = {"initializer_range", "use_cache", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {name: after[name] for name in before if name not in unsaid} == {
        name: value for name, value in before.items() if name not in unsaid
    }
