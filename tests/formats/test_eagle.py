"""EAGLE drafts as released and in the layouts of vLLM, SGLang and speculators: read, refused, and exported for torch
modules that load them strictly and give our logits."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.draft_heads import VOCAB, WIDTH, config_in, identical, random_params
from helpers.released import refusal, save
from helpers.torch_eagle import Eagle1
from helpers.torch_eagle import Eagle3 as TorchEagle3
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling

BASE = LlamaConfig(VOCAB, WIDTH, 80, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 61,
}  # fmt: skip
NESTED = {"model_type": "eagle", "model": TINY}  # vLLM's
FIELDS = {"speculators_model_type": "eagle3", "norm_before_residual": False, "draft_vocab_size": 20}
FIELDS |= {"transformer_layer_config": TINY}
ONE_FIELDS = {"speculators_model_type": "eagle", "transformer_layer_config": TINY}


def tensors_of(version: int, **settings) -> dict:
    """Tensors of plain torch modules; EAGLE-3 drafts every third token."""
    c = BASE.replace(n_layers=1, mlp_width=48)
    torch.manual_seed(0)
    if version == 1:
        return Eagle1(c, settings.pop("bias", False), **settings).state_dict()
    state = TorchEagle3(c, 3, 20, **settings).state_dict()
    state["d2t"] = 2 * torch.arange(20)
    return state | {"t2d": (torch.arange(61) % 3 == 0) & (torch.arange(61) < 60)}


def speculators_1(state: dict) -> dict:
    names = {"fc": "fusion_fc", "layers.0": "transformer"}
    return {re.sub("^(fc|layers.0)", lambda found: names[found[0]], name): x for name, x in state.items()}


EMBEDDING = {"embed_tokens.weight": torch.ones(61, 32)}
COPIES = EMBEDDING | {"lm_head.weight": torch.ones(61, 32)}  # of the base's
ONE, THREE = tensors_of(1), tensors_of(3)
RENAMED, BIASED = tensors_of(3, released=False), tensors_of(1, bias=True)
ALL = {key: x for key, x in tensors_of(3).items() if key not in ("d2t", "t2d")} | {"lm_head.weight": torch.ones(61, 32)}
LAYOUTS = {  # config.json, tensors, and what they are released as
    "released with a copy and a bias, the default": (TINY, BIASED | COPIES, BIASED),
    "EAGLE-3 of all tokens": (TINY | {"draft_vocab_size": 61}, ALL, ALL),
    "vLLM's own": (NESTED | {"architectures": ["EAGLEModel"]}, ONE | COPIES, ONE),
    "vLLM's own, truncated to all": (NESTED | {"truncated_vocab_size": 61, "intermediate_size": None}, ONE, ONE),
    "vLLM's own with a bias": (NESTED | {"bias": True}, BIASED, BIASED),
    "vLLM's own with its bias by the later name": (NESTED | {"eagle_fc_bias": True, "bias": False}, BIASED, BIASED),
    "vLLM's own, outer fields": (
        NESTED | {"model": TINY | {"intermediate_size": 7}, "intermediate_size": 48},
        ONE,
        ONE,
    ),
    "vLLM's own EAGLE-3": (NESTED | {"draft_vocab_size": 20, "method": "eagle3"}, THREE, THREE),
    "vLLM's name of the layer": (TINY | {"draft_vocab_size": 20}, RENAMED, THREE),
    "speculators": (FIELDS, RENAMED, THREE),
    "speculators with copies": (FIELDS, RENAMED | EMBEDDING | {"verifier_lm_head.weight": torch.ones(20, 32)}, THREE),
    "speculators EAGLE-1": (ONE_FIELDS | {"layernorms": False}, speculators_1(ONE), ONE),
    "speculators EAGLE-1 with a bias": (ONE_FIELDS | {"fusion_bias": True}, speculators_1(BIASED), BIASED),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_hold_the_released_tensors(tmp_path, name):
    config, state, released = LAYOUTS[name]
    drafter, params = load_draft(save(tmp_path / "theirs", state, config), BASE, None)
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
    drafter, _ = load_draft(save(tmp_path, THREE, TINY | {"draft_vocab_size": 20} | fields), BASE)
    assert [8 - place for place in drafter.spec.aux_hidden_layers] == layers
    assert drafter.vocabulary.tokens.tolist() == list(range(0, 60, 3))


LAYERS = "eagle_aux_hidden_state_layer_ids"


REFUSED = [  # fields over a plain config.json of the layout, further tensors, the message
    # of speculators' EAGLE-3: variants that compute something else, each by its field
    ("speculators", {"norm_before_fc": True}, {}, "norm_before_fc: got True"),
    ("speculators", {"fc_norm": True}, {}, "fc_norm: got True"),
    ("speculators", {"norm_output": True}, {}, "norm_output: got True"),
    ("speculators", {"embed_requires_grad": True}, {}, "embed_requires_grad: got True"),
    ("speculators", {"target_hidden_size": 64}, {}, "target_hidden_size: got 64, expected 32"),
    ("speculators", {"speculators_model_type": "medusa"}, {}, "speculators_model_type: got 'medusa'"),
    ("speculators", {"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config: got 'fp8'"),
    ("speculators", {"layer": {"model_type": "qwen3"}}, {}, "transformer_layer_config: model_type: got 'qwen3'"),
    ("speculators", {"layer": {"num_hidden_layers": 2}}, {}, "transformer_layer_config: num_hidden_layers: got 2"),
    ("speculators", {"layer": {"attention_bias": True}}, {}, "transformer_layer_config: attention_bias: got True"),
    ("speculators", {"layer": {"layer_types": ["sliding_attention"]}}, {}, "layer_types: got ['sliding_attention']"),
    ("speculators", {"layer": {"partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor: got 0.5"),
    ("speculators", {"layer": {"hidden_size": 64}}, {}, "width: got 64, expected 32; the heads were made"),
    ("speculators", {"layer": {"vocab_size": 62}}, {}, "vocabulary: got 62, expected 61; the heads"),
    ("speculators", {}, {"mask_hidden": torch.ones(96)}, "unexpected tensor 'mask_hidden'"),
    # layers that the base does not have, or does not read in this order
    ("speculators", {LAYERS: [2, 4, 8]}, {}, "expected increasing numbers from 0 to 7 for this base of 8"),
    ("speculators", {LAYERS: [4, 2, 5]}, {}, "got [4, 2, 5], expected increasing numbers"),
    ("speculators", {LAYERS: [2, 4]}, {}, "fc.weight: got shape [32, 96], expected [32, 64]"),
    (
        "released",
        {"eagle_config": {LAYERS: [2, 4, 7]}},
        {},
        f"eagle_config.{LAYERS}: got [2, 4, 7], expected increasing",
    ),
    ("released", {LAYERS: [2, 4, 5], "eagle_config": {LAYERS: [1, 3, 4]}}, {}, f"both {LAYERS} and eagle_config."),
    # of EAGLE-3 as released
    ("released", {"norm_output": True}, {}, "norm_output: got True"),
    ("released", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state: got False"),
    ("released", {}, {"t2d": torch.arange(61) < 20}, "t2d: got other tokens than in d2t"),
    ("released", {}, {"d2t": -torch.arange(20)}, "d2t: expected increasing token ids"),
    ("released", {}, {"d2t": torch.full((20,), 61)}, "d2t: expected increasing token ids"),
    ("released", {"draft_vocab_size": 62}, {}, "draft_vocab_size: got 62, expected at most"),
    ("released", {"draft_vocab_size": 61}, {}, "lm_head.weight: got shape [20, 32], expected [61, 32]"),
    # of EAGLE-1
    ("released 1", {"bias": False}, {"fc.bias": torch.ones(32)}, "unexpected tensor 'fc.bias'"),
    ("released 1", {"bias": True}, {}, "missing tensor 'fc.bias'"),
    ("released 1", {"hidden_size": 64}, {}, "width: got 64, expected 32; the heads were made for another base"),
    ("released 1", {"num_hidden_layers": 2}, {}, "num_hidden_layers: got 2, expected 1 in an EAGLE draft"),
    ("released 1", {}, {"embed_tokens.weight": torch.ones(7, 32)}, "vocabulary: got 7, expected 61"),
    ("released 1", {}, {"layers.1.mlp.up_proj.weight": torch.ones(48, 32)}, "unexpected tensor 'layers.1.mlp.up_proj"),
    ("speculators 1", {"layernorms": True}, {}, "layernorms: got True"),
    ("speculators 1", {"fusion_bias": True}, {}, "missing tensor 'fusion_fc.bias'"),
    ("nested", {"truncated_vocab_size": 30}, {}, "truncated_vocab_size: got 30, expected 61"),
    ("nested", {"add_para_norm": True}, {}, "add_para_norm: got True"),
    ("nested", {}, {"fc.bias": torch.ones(32)}, "unexpected tensor 'fc.bias'"),
    ("nested", {}, {"layers.0.input_layernorm.weight": torch.ones(32)}, "unexpected tensor 'layers.0.input_layernorm"),
    ("nested", {}, {"lm_head.weight": torch.ones(20, 32)}, "vocabulary: got 20, expected 61"),
]
PLAIN = {
    "speculators": (FIELDS, RENAMED),
    "released": (TINY | {"draft_vocab_size": 20}, THREE),
    "released 1": (TINY | {"bias": False}, ONE),
    "speculators 1": (ONE_FIELDS, speculators_1(ONE)),
    "nested": (NESTED, ONE),
}


@pytest.mark.parametrize("layout", PLAIN)
def test_what_is_not_computed_here_is_refused_by_its_name(tmp_path, layout):
    config, state = PLAIN[layout]
    for fields, more, message in [row[1:] for row in REFUSED if row[0] == layout]:
        layer = {"transformer_layer_config": TINY | fields["layer"]} if "layer" in fields else {}
        save(tmp_path, state | more, config | fields | layer)
        refusal(lambda: load_draft(tmp_path, BASE), "draft", str(tmp_path), message)


def test_other_refusals(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NESTED))  # without weights
    refusal(lambda: load_draft(tmp_path, BASE), "draft", "no draft heads of a supported format")
    save(tmp_path, *reversed(PLAIN["released"]))
    for n_layers in (2, 5):  # of which not three can be read
        refusal(lambda n=n_layers: load_draft(tmp_path, BASE.replace(n_layers=n)), "draft", f"got {n_layers} layers")


TOLERANCE = 1e-5  # relative to logits of magnitude 1 to 10
ODD = Vocabulary(range(1, VOCAB, 2))
MHA = BASE.replace(n_kv_heads=4, rope_theta=500.0, norm_eps=1e-5, mlp_width=48)
CASES = {
    "eagle": (MHA, {"fc_bias": True}),
    "eagle, no bias": (BASE, {"fc_bias": False, "depth": 5}),
    "eagle, scaled": (BASE.replace(rope_scaling=RopeScaling("linear", 4.0)), {}),
    "eagle, some tokens": (BASE, {"vocabulary": ODD}),
    "eagle3": (MHA, {}),
    "eagle3, some tokens": (BASE, {"vocabulary": ODD}),
    "eagle3, normed": (BASE, {"vocabulary": ODD, "norm_before_residual": True}),
    "eagle3, llama 3.1": (BASE.replace(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32), tied_lm_head=True), {}),
}


@pytest.fixture(scope="module")
def small(tiny_model):
    """The tiny base; drafts need its embedding and lm head."""
    return BoundBase(*tiny_model)


def drafter_of(name: str):
    config, settings = CASES[name]
    kind = Eagle3 if name.startswith("eagle3") else Eagle
    return dataclasses.replace(kind.for_base(config, jnp.float32), **settings)


def params_of(drafter, small) -> dict:
    return random_params(drafter, (small.model, small.params))


def official_module(drafter, format: str) -> torch.nn.Module:
    released, c = format != "speculators", drafter.config
    if isinstance(drafter, Eagle):
        return Eagle1(c, drafter.fc_bias, ("fc", "layers") if released else ("fusion_fc", "transformer"))
    known = None if drafter.vocabulary is None else len(drafter.vocabulary)
    variant = {"norm_before_residual": drafter.norm_before_residual}
    return TorchEagle3(c, len(drafter.spec.aux_hidden_layers), known, released, **variant)


EXPORTS = [
    *(("eagle", "eagle"), ("eagle, no bias", "speculators"), ("eagle, scaled", "eagle")),
    *(("eagle3", "speculators"), ("eagle3, llama 3.1", "eagle-3"), ("eagle3, some tokens", "eagle-3")),
    *(("eagle3, some tokens", "speculators"), ("eagle3, normed", "speculators")),
]


@pytest.mark.parametrize(("name", "format"), EXPORTS)
def test_official_modules_load_it_strictly_and_compute_our_logits(small, tmp_path, name, format):
    """And it is read back bit for bit, except for the depth, which only our own format stores."""
    drafter, base = drafter_of(name), CASES[name][0]
    params = params_of(drafter, small)
    export_heads(tmp_path, drafter, params, format=format, dtype=None)
    found, kept = load_draft(tmp_path, base, None)
    assert found == dataclasses.replace(drafter, depth=type(drafter).depth)
    identical(params, kept)
    official = official_module(drafter, format)
    official.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    if "llama 3.1" in name:  # whose scaling torch's plain module does not have
        return

    random = np.random.default_rng(5)
    tokens = random.integers(0, VOCAB, (2, 10))
    aux_hidden_states = random.standard_normal((2, 10, len(drafter.spec.aux_hidden_layers) * WIDTH)).astype(np.float32)
    following = np.asarray(small.params["embedding"])[np.roll(tokens, -1, axis=1)]
    with torch.no_grad():
        theirs = official(torch.tensor(following), torch.tensor(aux_hidden_states)).numpy()

    @jax.jit
    def logits_of(params):
        one = dataclasses.replace(drafter, depth=1)
        hidden = one.teacher_hidden(params, jnp.asarray(aux_hidden_states), jnp.asarray(tokens), small)
        return one.head_logits(params, 0, hidden[0], small)

    if isinstance(drafter, Eagle):
        theirs = theirs @ np.asarray(small.head_kernel())
    elif drafter.vocabulary is not None:  # d2t and t2d agree
        known = official.d2t.numpy() + np.arange(len(official.d2t))
        assert known.tolist() == np.flatnonzero(official.t2d).tolist() == ODD.tokens.tolist()
    assert 0.3 < theirs.std() < 10
    np.testing.assert_allclose(theirs, logits_of(params), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["eagle, no bias", "eagle, scaled", "eagle3, some tokens"])
def test_what_the_programs_need(small, tmp_path, name):
    """Fields without a default in eagle/model/{ea_model,configs,cnets,cnets1}.py, and in
    vllm/transformers_utils/configs/speculators, src/speculators/{config.py,models/eagle3/config.py}.
    """
    drafter = drafter_of(name)
    c, params, one = drafter.config, params_of(drafter, small), isinstance(drafter, Eagle)
    for format in ("eagle" if one else "eagle-3", "speculators"):
        export_heads(tmp_path / format, drafter, params, format=format, base_name="lab/base")
    config = config_in(tmp_path / ("eagle" if one else "eagle-3"))
    layer = {
        "hidden_size": WIDTH, "intermediate_size": c.mlp_width, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta,
        "model_type": "llama",
    }  # fmt: skip
    own = {"bias": drafter.fc_bias, "architectures": ["LlamaForCausalLM"]} if one else {
        "draft_vocab_size": len(ODD), "architectures": ["LlamaForCausalLMEagle3"]
    }  # fmt: skip
    more = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "base_model_name_or_path": "lab/base"}
    assert (layer | own | more).items() <= config.items()
    assert config["rope_scaling"] == ({"type": "linear", "factor": 4.0} if "scaled" in name else None)

    config = config_in(tmp_path / "speculators")
    kind = "eagle" if one else "eagle3"
    assert config["speculators_model_type"] == kind
    found = config["speculators_config"]
    assert (found["algorithm"], found["verifier"]["name_or_path"]) == (kind, "lab/base")
    assert found["default_proposal_method"] in [method["proposal_type"] for method in found["proposal_methods"]]
    assert found["proposal_methods"][0]["speculative_tokens"] == 5
    assert (layer | {"head_dim": 8}).items() <= config["transformer_layer_config"].items()
    if one:
        assert (config["fusion_bias"], config["layernorms"]) == (drafter.fc_bias, False)
    else:
        assert config["norm_before_residual"] is False  # a missing one means true to vLLM
        assert config["draft_vocab_size"] == len(ODD)
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # of 8 layers: 2, L // 2 and L - 3


@pytest.mark.parametrize("layers", [[1, 5], [4, 7, 9], [0, 2, 5, 11]])
def test_other_layers_are_written_by_speculators_alone(small, tmp_path, layers):
    """[4, 7, 9] is the default of 10 layers counted from the end, which is why the base's depth must be known."""
    base = BASE.replace(n_layers=12)
    drafter = Eagle3(base.plain_layer, tuple(12 - layer for layer in layers))
    params, record = params_of(drafter, small), {"shapes": {"n_layers": 12}, "sha256": "0"}
    export_heads(tmp_path / "heads", drafter, params, dtype=None, base_fingerprint=record)
    assert config_in(tmp_path / "heads")["eagle_aux_hidden_state_layer_ids"] == layers
    assert load_draft(tmp_path / "heads", base, None)[0] == drafter
    pieces = ("expected one of speculators, native", f"layers {layers}", "2, L // 2 and L - 3")
    refused(tmp_path, drafter, "eagle-3", *pieces, base_fingerprint=record)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 6, 7, 11, 32])
def test_the_default_layers_need_no_recorded_depth(small, tmp_path, n_layers):
    base = BASE.replace(n_layers=n_layers)
    drafter = Eagle3(base.plain_layer, default_aux_hidden_layers(n_layers))
    export_heads(tmp_path, drafter, params_of(drafter, small), dtype=None)
    assert load_draft(tmp_path, base, None)[0] == drafter
    assert ("speculators_config" in config_in(tmp_path)) == (n_layers not in (3, 7, 11, 32))  # others have not three


CANNOT = [
    ("eagle", drafter_of("eagle3"), ("eagle for EAGLE-3 heads", "one of eagle-3, speculators, native")),
    ("eagle-3", drafter_of("eagle"), ("eagle-3 for EAGLE heads", "one of eagle, speculators, native")),
    ("eagle-3", drafter_of("eagle3, normed"), ("norm_before_residual: got True", "one of speculators, native")),
    ("hydra", drafter_of("eagle"), ("got hydra for EAGLE heads",)),
    ("medusa", drafter_of("eagle3"), ("got medusa for EAGLE-3 heads",)),
    ("eagle", drafter_of("eagle, some tokens"), ("vocabulary: got 30 tokens, expected all 61", "one of native")),
    ("speculators", drafter_of("eagle, some tokens"), ("vocabulary: got 30 tokens, expected all 61",)),
    ("eagle", Eagle(BASE.replace(n_layers=1, qkv_bias=True)), ("qkv_bias=True", "LLaMA's plain layer")),
    ("speculators", Eagle3(BASE.plain_layer, (9, 2)), ("aux_hidden_layers: got (9, 2)", "unknown depth")),
    ("speculators", Eagle3(BASE.plain_layer, (3, 5)), ("aux_hidden_layers: got (3, 5)", "unknown depth")),
]


def test_formats_that_cannot_express_it(tmp_path):
    for format, drafter, pieces in CANNOT:
        refused(tmp_path, drafter, format, *pieces)


def refused(folder: Path, drafter, format, *pieces: str, **settings) -> None:
    """The export fails and leaves no files."""
    refusal(lambda: export_heads(folder / "refused", drafter, {}, format=format, **settings), "export", *pieces)
    assert not (folder / "refused").exists()


NATIVE = [  # the setting, its value, parts of the message
    ("depth", 0, ("depth: got 0",)),
    ("depth", 10**9, ("depth: got 1000000000",)),
    ("ttt_length", 0, ("ttt_length: got 0",)),
    ("aux_hidden_layers", [9, 4, 3], ("aux_hidden_layers: got [9, 4, 3]", "has 8")),
    ("aux_hidden_layers", [6] * 9, ("aux_hidden_layers: got", "has 8")),
    ("vocabulary", [1, VOCAB], ("another base", f"got token {VOCAB}")),
    ("config.vocab_size", VOCAB + 1, ("another base", f"vocabulary: got {VOCAB + 1}, expected {VOCAB}")),
    ("config.width", 64, ("another base", "width: got 64, expected 32")),
    ("config.mlp_width", 10**9, ("mlp_width 1000000000",)),
    ("config.head_dim", 10**9, ("heads of 1000000000",)),
    ("config.n_layers", 2, ("plain layer",)),
    ("config.qk_norm", True, ("plain layer",)),
    ("config.rope_scaling", {"kind": "dynamic", "factor": 2.0}, ("rope scaling", "'dynamic'")),
    ("prefix", True, ("prefix: got true, expected false: eagle3 has no prefix layer",)),  # next to the settings
]


def test_invalid_settings_and_those_of_another_base(small, tmp_path):
    drafter = drafter_of("eagle3, some tokens")
    export_heads(tmp_path, drafter, params_of(drafter, small), format="native")
    whole = (tmp_path / "config.json").read_text()
    for name, value, pieces in NATIVE:
        config = json.loads(whole)
        at, *parts = config["drafter"] if name == "prefix" else config["drafter"]["settings"], *name.split(".")
        for part in parts[:-1]:
            at = at[part]
        at[parts[-1]] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        refusal(lambda: load_draft(tmp_path, BASE), "draft", *pieces)
