"""config.json of every family: fields left out, sliding windows, refusals and the way back.

What a file leaves out is taken from transformers (`as_transformers_reads`), the independent source of defaults.
"""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from helpers import family_settings, latent_settings
from helpers.configs import LATENT, LFM, QWEN_HYBRIDS, as_transformers_reads, sizes, written
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_registry import FAMILIES, from_llama_config, to_llama_config
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling

# No value is the default of any family, and the defaults of 8 or 32 key-value heads go with 64 heads.
FULL = {
    **sizes(128, 80, 3, 64, 16, 96),
    "head_dim": 6,
    "max_position_embeddings": 5000,
    "rms_norm_eps": 1e-3,
    "rope_theta": 3e4,
    "tie_word_embeddings": True,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 0}
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", *WINDOW)
OPTIONAL += ("tie_word_embeddings", "hidden_act")


UNWINDOWED = ("llama", "olmo2", "granite", "olmoe", "glm4_moe", "olmo_hybrid", *QWEN_HYBRIDS)
UNWINDOWED += ("seed_oss", "hunyuan_v1_dense", "nanochat", "granitemoehybrid", "nemotron_h", *LATENT)
WINDOWED = [kind for kind in FAMILIES if kind not in UNWINDOWED]
QWEN = ("qwen2", "qwen3")


def full(kind: str) -> dict:
    fields = {"model_type": kind} | FULL | (WINDOW if kind in WINDOWED else {})
    if kind == "olmo3":  # transformers 5 takes the theta of layers with a window from the default
        fields["rope_theta"] = 5e5
    if kind == "glm4_moe":  # rotates half of a head's features, an even number
        fields |= {"hidden_size": 512, "head_dim": 12}
    if kind in LFM:
        fields |= {"norm_eps": 1e-3, "layer_types": ["conv", "full_attention", "conv"]}
    if kind in QWEN_HYBRIDS:  # a quarter, and one layer of attention
        fields |= {"head_dim": 16, "num_hidden_layers": 4}
    if kind == "granitemoehybrid":
        fields |= {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "rope"}
    if kind == "nanochat":
        fields["hidden_act"] = "relu2"
    if kind == "deepseek_v2":  # without a default
        fields["num_experts_per_tok"] = 3
    if kind == "glm4_moe_lite":  # where transformers has one attribute for both
        fields["qk_rope_head_dim"] = fields["head_dim"]
    if kind == "nemotron_h":  # which cannot share its embedding
        fields |= {"layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}
    return fields


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_a_field_left_out_is_what_transformers_takes(kind, tmp_path):
    for gone in ((), *((name,) for name in OPTIONAL), OPTIONAL):
        raw = {name: value for name, value in full(kind).items() if name not in gone}
        assert to_llama_config(raw) == as_transformers_reads(written(tmp_path, raw)), gone


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_old_and_new_rope_fields():
    linear = RopeScaling("linear", 4.0)
    for fields, theta, scaling in (
        ({}, 1e4, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, linear),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}}, 5e5, linear),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 5e5, LLAMA3_SCALING),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0}}, 3e4, linear),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}, 5e5, LLAMA3_SCALING),
    ):
        raw = {name: value for name, value in full("llama").items() if name != "rope_theta"} | fields
        config = to_llama_config(raw)
        assert (config.rope_theta, config.rope_scaling) == (theta, scaling), fields


SLIDING, FULL_ATTENTION = "sliding_attention", "full_attention"


def alike(tmp_path, kind: str, fields: dict) -> LlamaConfig:
    """Return what we read, which transformers reads too."""
    raw = full(kind) | fields
    config = to_llama_config(raw)
    assert config == as_transformers_reads(written(tmp_path, raw)), raw
    return config


WINDOWS = [
    ("mistral", {"use_sliding_window": False}, 99),  # not one of Mistral's fields
    ("mistral", {"max_window_layers": 3}, 99),
    ("mistral", {"sliding_window": None}, None),
    ("mistral", {"sliding_window": 4999}, 4999),
    ("mistral", {"sliding_window": 5000}, None),
    ("qwen", {}, 99),
    ("qwen", {"use_sliding_window": False}, None),
    ("qwen", {"sliding_window": None}, None),
    ("qwen", {"sliding_window": 5000}, None),
    ("qwen", {"max_window_layers": 3}, None),
    ("qwen", {"max_window_layers": 28}, None),
    ("qwen", {"layer_types": [SLIDING] * 3, "max_window_layers": 3}, 99),  # layer_types has the last word
    ("qwen", {"layer_types": [FULL_ATTENTION] * 3}, None),
    ("qwen", {"layer_types": None}, 99),
    ("gemma2", {"layer_types": [SLIDING] * 3}, 99),
    ("gemma2", {"layer_types": [FULL_ATTENTION] * 3}, None),
    ("gemma2", {"sliding_window": 5000}, None),
    ("smollm3", {"no_rope_layers": [0, 0, 0]}, 99),
    ("smollm3", {"no_rope_layers": [0, 0, 0], "use_sliding_window": False}, None),
    ("phi3", {}, 99),
    ("phi3", {"sliding_window": None}, None),
    # Windows in some layers only.
    ("qwen", {"max_window_layers": 1}, [None, 99, 99]),
    ("qwen", {"max_window_layers": 2}, [None, None, 99]),
    ("qwen", {"layer_types": [FULL_ATTENTION, SLIDING, SLIDING]}, [None, 99, 99]),
    ("qwen", {"layer_types": [SLIDING, FULL_ATTENTION, SLIDING]}, [99, None, 99]),
]


def test_windows_of_all_layers_and_of_some(tmp_path):
    for family, fields, expected in WINDOWS:
        for kind in QWEN if family == "qwen" else (family,):
            config = alike(tmp_path, kind, fields)
            if isinstance(expected, list):
                assert [layer.sliding_window for layer in config.layer_kinds] == expected
                assert [config.of_layer(i).sliding_window for i in range(3)] == expected
            else:
                assert config.sliding_window == expected, (kind, fields)


def test_windows_of_the_context_or_more_are_none():
    assert to_llama_config(full("mistral") | {"sliding_window": 5001}).sliding_window is None
    assert to_llama_config(full("llama") | WINDOW).sliding_window is None  # LLaMA has no such field
    without = {name: value for name, value in full("mistral").items() if name != "sliding_window"}
    assert to_llama_config(without).sliding_window == 4096  # transformers' default
    assert to_llama_config(without | {"max_position_embeddings": 4096}).sliding_window is None
    for kind in QWEN:
        long = full(kind) | {"sliding_window": 5000}
        for fields in ({"max_window_layers": 1}, {"layer_types": [FULL_ATTENTION, SLIDING, SLIDING]}):
            assert to_llama_config(long | fields) == to_llama_config(long | {"use_sliding_window": False})


@pytest.mark.parametrize("kind", QWEN)
def test_types_that_are_not_those_of_the_layers_are_refused(kind):
    for types in ([SLIDING, SLIDING], ["chunked_attention"] * 3, "sliding_attention"):
        fields = full(kind) | {"layer_types": types}
        refused(fields, "here/config.json", "layer_types", "full_attention or sliding_attention", "each of 3 layers")
        assert to_llama_config(fields | {"sliding_window": 5000}).sliding_window is None


def test_layers_that_differ(tmp_path):
    for kind, fields in (
        *((kind, {"num_hidden_layers": 8}) for kind in ("gemma2", "gemma3_text", "olmo3", "smollm3")),
        ("gemma3_text", {"num_hidden_layers": 8, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 2e4}),
        ("gemma3_text", {"sliding_window": 5000, "sliding_window_pattern": 2}),
        ("olmo3", {"layer_types": [FULL_ATTENTION, SLIDING, FULL_ATTENTION]}),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}),
        ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
        ("smollm3", {"no_rope_layer_interval": 2, "layer_types": [SLIDING, FULL_ATTENTION, FULL_ATTENTION]}),
    ):
        config = alike(tmp_path, kind, fields)
        assert len(set(config.kinds)) > 1, (kind, fields)
        assert to_llama_config(from_llama_config(config, "base")) == config


def test_layers_of_several_kinds_repeat_with_another_depth():
    config = to_llama_config(full("qwen2") | {"layer_types": [SLIDING, FULL_ATTENTION, SLIDING]})
    assert [kind.sliding_window for kind in config.replace(n_layers=1).kinds] == [99]
    assert [kind.sliding_window for kind in config.replace(n_layers=5).kinds] == [99, None, 99, 99, None]
    assert config.plain_layer.kinds == (LayerKind(None, config.rope_theta, None),)


def test_a_slip_in_the_number_of_layers_takes_no_memory():
    for kind in ("gemma2", "gemma3_text", "olmo3", "smollm3", "qwen2"):  # several kinds of layers
        fields = full(kind) | {"num_hidden_layers": 10**6, "max_window_layers": 5}
        refused(fields, "num_hidden_layers", "at most 4096")
    for kind in ("mistral", "qwen2"):
        tracemalloc.start()
        try:
            assert to_llama_config(full(kind) | {"num_hidden_layers": 10**6}).n_layers == 10**6
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10**6


def refused(raw: dict, *pieces: str) -> None:
    refusal(lambda: to_llama_config(raw, "here/config.json"), *pieces)


def test_other_families_are_refused_with_the_supported_ones_and_what_they_need():
    supported = ("'llama'", "'mistral'", "'qwen2'", "'qwen3'", "Vicuna", "Qwen 2, 2.5", "'gemma3_text'")
    refused(FULL, "model_type", "None", *supported)
    for kind in ("gpt2", "LLAMA", "", None, 3, ["llama"]):
        refused(FULL | {"model_type": kind}, "here/config.json", "model_type", repr(kind), *supported)
    for kind, piece in (
        ("gemma3", "save its language model alone, as 'gemma3_text'"),
        ("llama4", "vision tower"),
        ("deepseek_v32", "sparse attention"),
    ):
        refused(FULL | {"model_type": kind}, "model_type", repr(kind), piece, *supported)


REFUSED = [
    ({"attention_bias": True}, ("here/config.json", "attention_bias", "True", "false")),
    ({"hidden_act": "gelu", "hidden_activation": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
    *(
        ({field: {key: rope, "factor": 4.0}}, ("rope scaling", repr(rope), "'linear'", "'llama3'"))
        for field, key in (("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type"))
        for rope in ("dynamic", "mrope")
    ),
    ({"mlp_bias": True}, ("mlp_bias", "True", "false")),
    ({"rope_parameters": "linear"}, ("rope_parameters", "'linear'", "an object")),
    ({"rope_scaling": "linear"}, ("rope_scaling", "'linear'", "an object")),
    ({"rope_scaling": {"type": "linear"}}, ("factor", "missing")),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, ("factor", "positive", "0")),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ("low_freq_factor", "missing")),
    ({"rope_scaling": {"type": "yarn"}}, ("factor", "missing")),
    ({"rope_scaling": {"type": "yarn", "factor": -2.0}}, ("factor", "positive", "-2")),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -3.0}}, ("beta_fast", "positive", "-3")),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ("long_factor", "missing")),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        ("short_factors", "got 1", "expected 3"),
    ),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, ("low_freq_factor", "less than", "4.0")),
    ({"hidden_size": "wide"}, ("wrong type", "wide")),
    ({"num_hidden_layers": None}, ("wrong type",)),
    ({"vocab_size": float("inf")}, ("wrong type",)),
    ({"num_hidden_layers": 0}, ("n_layers", "at least 1")),
    ({"num_attention_heads": -2}, ("num_attention_heads", "-2")),
    ({"num_key_value_heads": 7}, ("n_kv_heads", "7")),
    ({"head_dim": 7}, ("head_dim", "even", "7")),
]


def test_a_draft_of_ministral_has_no_factor_of_queries():
    base = to_llama_config({"model_type": "ministral3"} | FULL)
    assert base.rope_scaling.query_beta == 0.1
    assert from_llama_config(base.plain_layer.replace(qk_norm=True), "draft")["model_type"] == "qwen3"


OF_FAMILIES = [
    ("nemotron_h", {"moe_latent_size": 64}, ("moe_latent_size", "64", "none")),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, ("mlp_hidden_act", "'silu'", "'relu2'")),
    ("nemotron_h", {"hybrid_override_pattern": "-M*"}, ("layers_block_type", "before each MLP")),
    ("nemotron_h", {"hybrid_override_pattern": "M-E*"}, ("layers_block_type", "before each MLP")),
    ("nemotron_h", {"hybrid_override_pattern": "M?"}, ("layer_types", "'?'", "mlp or moe")),
    ("nemotron_h", {"tie_word_embeddings": True}, ("tie_word_embeddings", "True", "False")),
    ("nemotron_h", {"n_groups": 3}, ("recurrent layer", "heads", "128", "a multiple of 3")),
    ("gpt_oss", {"swiglu_limit": 0}, ("swiglu_limit", "0", "a positive number")),
    ("gpt_oss", {"swiglu_alpha": None}, ("wrong type",)),
    ("gpt_oss", {"num_experts_per_tok": 129}, ("per_token", "129", "at most 128")),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, ("layer_types", "'chunked_attention'", SLIDING)),
    ("muse_glimmer_text", {"layer_rope_theta": [0, 1e4]}, ("layer_rope_theta", "for each of 3 layers")),
    ("muse_glimmer_text", {"layer_rope_theta": ["0"] * 3}, ("layer_rope_theta", "a number for each")),
    ("muse_glimmer_text", {"output_multiplier": 0}, ("output_multiplier", "a positive number")),
    ("muse_glimmer_text", {"attention_bias": True}, ("attention_bias", "True", "false")),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, ("sliding_window_pattern", "'LLLG'", "or layer_types")),
    ("exaone4", {"sliding_window": None, "layer_types": [SLIDING] * 3}, ("sliding_window", "None", "a number")),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, ("llama_4_scaling_beta", "without YaRN")),
    ("nanochat", {"hidden_act": "silu"}, ("hidden_act", "'silu'", "'relu2'")),
    ("mistral3", {}, ("vision tower", "'ministral3'")),
    ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method", "'greedy'", "'noaux_tc'")),
    ("kimi_k2", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
    ("deepseek_v2", {"norm_topk_prob": True}, ("norm_topk_prob", "True", "False")),
    ("deepseek_v3", {"moe_layer_freq": 2}, ("moe_layer_freq", "2", "1")),
    ("glm4_moe_lite", {"kv_lora_rank": 0}, ("latent attention: rank", "0", "at least 1")),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, ("head_dim", "7", "an even number")),
    ("deepseek_v3", {"q_lora_rank": "wide"}, ("wrong type", "wide")),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "wide", "sparse"]}, ("layer_types", "'wide'", "dense or sparse")),
    *(("mistral", {"sliding_window": window}, ("at least 1",)) for window in (0, -5)),
    ("mistral", {"sliding_window": "wide"}, ("wrong type",)),
    # Refusals of fields that all families share are tried on three of them.
    *((kind, *row) for kind in ("llama", "qwen2", "gemma2") for row in REFUSED),
]


def test_what_the_model_lacks_is_refused_by_name():
    for kind, fields, pieces in OF_FAMILIES:
        refused(full(kind) | fields, *pieces)


DRAWN = family_settings.FAMILIES | family_settings.HYBRID_FAMILIES
DRAWN |= {"gpt_oss": family_settings.EXPERT_FAMILIES["gpt_oss"]} | latent_settings.FAMILIES


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(list(DRAWN)).flatmap(lambda k: st.tuples(st.just(k), DRAWN[k])))
def test_settings_of_every_family_survive_and_mean_the_same_to_transformers(tmp_path_factory, drawn):
    kind, fields = drawn
    folder = tmp_path_factory.getbasetemp() / "settings"
    AutoConfig.for_model(kind, **(family_settings.SHARED | fields)).save_pretrained(folder)
    config = to_llama_config(json.loads((folder / "config.json").read_text()))
    assert config == as_transformers_reads(folder)
    raw = from_llama_config(config, "base")
    assert to_llama_config(raw) == config
    assert as_transformers_reads(written(folder, raw)) == config
    assert AutoConfig.from_pretrained(folder).architectures == raw["architectures"]
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert to_llama_config(json.loads((folder / "config.json").read_text())) == config


def test_a_config_of_no_family_is_refused():
    with pytest.raises(HydrajaxError, match="output: no family has both qkv_bias and qk_norm"):
        from_llama_config(LlamaConfig(9, 8, 8, 1, 1, 1, 8, qkv_bias=True, qk_norm=True), "output")
