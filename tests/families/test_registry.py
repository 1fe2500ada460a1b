"""config.json of every family: fields left out, sliding windows, refusals and the way back.

What a configuration means is taken from transformers (`as_transformers_reads`), the independent source of defaults.
"""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from helpers import dense_models
from helpers.configs import as_transformers_reads, sizes, written
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_registry import FAMILIES, from_llama_config, to_llama_config
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling

# --- fields left out ------------------------------------------------------------------------------------------

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


WINDOWED = [kind for kind in FAMILIES if kind not in ("llama", "olmo2", "granite", "olmoe", "glm4_moe")]
QWEN = ("qwen2", "qwen3")


def full(kind: str) -> dict:
    fields = {"model_type": kind} | FULL | (WINDOW if kind in WINDOWED else {})
    if kind == "olmo3":  # transformers 5 takes the theta of layers with a window from the default
        fields["rope_theta"] = 5e5
    if kind == "glm4_moe":  # rotates half of a head's features, an even number
        fields |= {"hidden_size": 512, "head_dim": 12}
    return fields


@pytest.mark.parametrize(
    "left_out", [(), *((name,) for name in (*OPTIONAL, "tie_word_embeddings", "hidden_act")), "all"]
)
@pytest.mark.parametrize("kind", list(FAMILIES))
def test_a_field_left_out_is_what_transformers_takes(kind, left_out, tmp_path):
    gone = (*OPTIONAL, "tie_word_embeddings", "hidden_act") if left_out == "all" else left_out
    raw = {name: value for name, value in full(kind).items() if name not in gone}
    assert to_llama_config(raw) == as_transformers_reads(written(tmp_path, raw))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 10_000.0, RopeScaling("linear", 4.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}}, 5e5, RopeScaling("linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 5e5, LLAMA3_SCALING),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0}},
            3e4,
            RopeScaling("linear", 4.0),
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}, 5e5, LLAMA3_SCALING),
    ],
)
def test_old_and_new_rope_fields(fields, theta, scaling):
    raw = {name: value for name, value in full("llama").items() if name != "rope_theta"} | fields
    config = to_llama_config(raw)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


# --- sliding windows ------------------------------------------------------------------------------------------

SLIDING, FULL_ATTENTION = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kind", "fields", "window"),
    [
        ("mistral", {"use_sliding_window": False}, 99),  # not one of Mistral's fields
        ("mistral", {"max_window_layers": 3}, 99),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 4999}, 4999),
        ("mistral", {"sliding_window": 5000}, None),
        ("mistral", {"sliding_window": 5001}, None),
        *(
            case
            for kind in ("qwen2", "qwen3")
            for case in (
                (kind, {}, 99),
                (kind, {"use_sliding_window": False}, None),
                (kind, {"sliding_window": None}, None),
                (kind, {"sliding_window": 5000}, None),
                (kind, {"max_window_layers": 3}, None),
                (kind, {"max_window_layers": 28}, None),
                (kind, {"layer_types": [SLIDING] * 3, "max_window_layers": 3}, 99),  # layer_types has the last word
                (kind, {"layer_types": [FULL_ATTENTION] * 3}, None),
                (kind, {"layer_types": None}, 99),
            )
        ),
        *(("gemma2", {"layer_types": [name] * 3}, window) for name, window in ((SLIDING, 99), (FULL_ATTENTION, None))),
        ("gemma2", {"sliding_window": 5000}, None),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, 99),
        ("smollm3", {"no_rope_layers": [0, 0, 0], "use_sliding_window": False}, None),
        ("phi3", {}, 99),
        ("phi3", {"sliding_window": None}, None),
    ],
)
def test_windows_that_are_the_same_in_all_layers(kind, fields, window, tmp_path):
    raw = full(kind) | fields
    config = to_llama_config(raw)
    assert config.sliding_window == window
    assert config == as_transformers_reads(written(tmp_path, raw))


def test_mistral_without_the_field_has_the_window_of_transformers():
    raw = {name: value for name, value in full("mistral").items() if name != "sliding_window"}
    assert to_llama_config(raw).sliding_window == 4096
    assert to_llama_config(raw | {"max_position_embeddings": 4096}).sliding_window is None


def test_llama_has_no_window():
    assert to_llama_config(full("llama") | WINDOW).sliding_window is None


@pytest.mark.parametrize("kind", QWEN)
@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"max_window_layers": 1}, [None, 99, 99]),
        ({"max_window_layers": 2}, [None, None, 99]),
        ({"layer_types": [FULL_ATTENTION, SLIDING, SLIDING]}, [None, 99, 99]),
        ({"layer_types": [SLIDING, FULL_ATTENTION, SLIDING]}, [99, None, 99]),
    ],
)
def test_windows_in_some_layers_only(kind, fields, windows, tmp_path):
    raw = full(kind) | fields
    config = to_llama_config(raw)
    assert [layer.sliding_window for layer in config.layer_kinds] == windows
    assert [config.of_layer(i).sliding_window for i in range(3)] == windows
    assert config == as_transformers_reads(written(tmp_path, raw))
    # Where the window is as long as the context the layers are alike.
    assert to_llama_config(raw | {"sliding_window": 5000}) == to_llama_config(raw | {"use_sliding_window": False})


@pytest.mark.parametrize("kind", QWEN)
@pytest.mark.parametrize("types", [[SLIDING, SLIDING], ["chunked_attention"] * 3, "sliding_attention"])
def test_types_that_are_not_those_of_the_layers_are_refused(kind, types):
    fields = full(kind) | {"layer_types": types}
    refused(fields, "here/config.json", "layer_types", "full_attention or sliding_attention", "each of 3 layers")
    assert to_llama_config(fields | {"sliding_window": 5000}).sliding_window is None


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {"num_hidden_layers": 8}) for kind in ("gemma2", "gemma3_text", "olmo3", "smollm3")),
        ("gemma3_text", {"num_hidden_layers": 8, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 2e4}),
        ("gemma3_text", {"sliding_window": 5000, "sliding_window_pattern": 2}),
        ("olmo3", {"layer_types": [FULL_ATTENTION, SLIDING, FULL_ATTENTION]}),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}),
        ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
        ("smollm3", {"no_rope_layer_interval": 2, "layer_types": [SLIDING, FULL_ATTENTION, FULL_ATTENTION]}),
    ],
)
def test_layers_that_differ(kind, fields, tmp_path):
    raw = full(kind) | fields
    config = to_llama_config(raw)
    assert len(set(config.kinds)) > 1
    assert config == as_transformers_reads(written(tmp_path, raw))
    assert to_llama_config(from_llama_config(config, "base")) == config


def test_layers_of_several_kinds_repeat_with_another_depth():
    config = to_llama_config(full("qwen2") | {"layer_types": [SLIDING, FULL_ATTENTION, SLIDING]})
    assert [kind.sliding_window for kind in config.replace(n_layers=1).kinds] == [99]
    assert [kind.sliding_window for kind in config.replace(n_layers=5).kinds] == [99, None, 99, 99, None]
    assert config.plain_layer.kinds == (LayerKind(None, config.rope_theta, None),)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo3", "smollm3", "qwen2"])
def test_a_slip_in_the_number_of_layers_of_several_kinds_is_refused(kind):
    refused(full(kind) | {"num_hidden_layers": 10**6, "max_window_layers": 5}, "num_hidden_layers", "at most 4096")


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_slip_in_the_number_of_layers_takes_no_memory(kind):
    tracemalloc.start()
    try:
        assert to_llama_config(full(kind) | {"num_hidden_layers": 10**6}).n_layers == 10**6
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10**6


# --- refusals -------------------------------------------------------------------------------------------------


def refused(raw: dict, *pieces: str) -> None:
    refusal(lambda: to_llama_config(raw, "here/config.json"), *pieces)


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "gpt_oss", "LLAMA", "", None, 3, ["llama"]])
def test_another_family_is_refused_with_the_supported_ones(kind):
    pieces = ("'llama'", "'mistral'", "'qwen2'", "'qwen3'", "Vicuna", "Qwen 2, 2.5", "'gemma3_text'")
    refused(full("llama") | {"model_type": kind}, "here/config.json", "model_type", repr(kind), *pieces)


def test_a_file_without_a_family():
    refused(FULL, "model_type", "None", "'llama'", "'mistral'", "'qwen2'", "'qwen3'")


@pytest.mark.parametrize(
    ("kind", "piece"),
    [
        ("gemma3", "save its language model alone, as 'gemma3_text'"),
        ("llama4", "vision tower"),
        ("gpt_oss", "attention sinks"),
        *((kind, "latent attention") for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
        ("qwen3_next", "linear attention"),
    ],
)
def test_what_another_family_needs_is_named(kind, piece):
    refused(full("llama") | {"model_type": kind}, "model_type", repr(kind), piece, "'qwen3'")


# Two refusals say the same for all families; the others are tried on a few.
SOME = ("llama", "qwen2", "gemma2")


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"attention_bias": True}, ("here/config.json", "attention_bias", "True", "false")),
        ({"hidden_act": "gelu", "hidden_activation": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        *(
            ({field: {key: rope, "factor": 4.0}}, ("rope scaling", repr(rope), "'linear'", "'llama3'"))
            for field, key in (
                ("rope_scaling", "type"),
                ("rope_scaling", "rope_type"),
                ("rope_parameters", "rope_type"),
            )
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
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            ("low_freq_factor", "less than", "4.0"),
        ),
        ({"hidden_size": "wide"}, ("wrong type", "wide")),
        ({"num_hidden_layers": None}, ("wrong type",)),
        ({"vocab_size": float("inf")}, ("wrong type",)),
        ({"num_hidden_layers": 0}, ("n_layers", "at least 1")),
        ({"num_attention_heads": -2}, ("num_attention_heads", "-2")),
        ({"num_key_value_heads": 7}, ("n_kv_heads", "7")),
        ({"head_dim": 7}, ("head_dim", "even", "7")),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(kind, fields, pieces):
    refused(full(kind) | fields, *pieces)


@pytest.mark.parametrize(("window", "piece"), [(0, "at least 1"), (-5, "at least 1"), ("wide", "wrong type")])
def test_impossible_windows(window, piece):
    refused(full("mistral") | {"sliding_window": window}, piece)


# --- the way back ---------------------------------------------------------------------------------------------


@st.composite
def configs(draw) -> LlamaConfig:
    """Of LLaMA, Mistral and Qwen. A window is shorter than the context; a width is a multiple of the heads, as
    transformers' LLaMA insists even with a head_dim.
    """
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = kv_heads * group
    kind = draw(st.sampled_from(["llama", "mistral", *QWEN]))
    context = draw(st.integers(2, 200_000))
    window = st.integers(1, context - 1)
    if kind != "mistral":
        window = st.none() if kind == "llama" else st.none() | window
    factors = st.floats(1.0, 64.0)
    return LlamaConfig(
        vocab_size=draw(st.integers(1, 10**6)),
        width=heads * draw(st.integers(1, 64)),
        mlp_width=draw(st.integers(1, 10**5)),
        n_layers=draw(st.integers(1, 100)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 128)),
        max_positions=context,
        norm_eps=draw(st.floats(1e-8, 1e-2)),
        rope_theta=draw(st.floats(100.0, 1e8)),
        rope_scaling=draw(
            st.none()
            | st.builds(RopeScaling, st.just("linear"), factors)
            | st.builds(
                RopeScaling, st.just("llama3"), factors, st.floats(0.5, 2.0), st.floats(2.5, 8.0), st.integers(1, 10**5)
            )
            | st.builds(
                RopeScaling,
                st.just("yarn"),
                factors,
                st.just(1.0),
                st.just(4.0),
                st.integers(1, 10**5),
                st.floats(8.0, 64.0),
                st.floats(0.5, 4.0),
                st.floats(0.5, 2.0),
                st.booleans(),
            )
        ),
        tied_lm_head=draw(st.booleans()),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=draw(window),
    )


@settings(max_examples=40, deadline=None)
@given(configs())
def test_a_config_survives_its_file_and_means_the_same_to_transformers(tmp_path_factory, config):
    folder = tmp_path_factory.getbasetemp() / "there_and_back"
    raw = from_llama_config(config, "base")
    written(folder, raw)
    assert to_llama_config(json.loads((folder / "config.json").read_text())) == config
    assert as_transformers_reads(folder) == config
    assert AutoConfig.from_pretrained(folder).architectures == raw["architectures"]
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert to_llama_config(json.loads((folder / "config.json").read_text())) == config


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(dense_models.FAMILIES)).flatmap(lambda k: st.tuples(st.just(k), dense_models.FAMILIES[k])))
def test_settings_of_every_family_survive_and_mean_the_same_to_transformers(tmp_path_factory, drawn):
    kind, fields = drawn
    folder = tmp_path_factory.getbasetemp() / "settings"
    AutoConfig.for_model(kind, **(dense_models.SHARED | fields)).save_pretrained(folder)
    config = to_llama_config(json.loads((folder / "config.json").read_text()))
    assert config == as_transformers_reads(folder)
    raw = from_llama_config(config, "base")
    assert to_llama_config(raw) == config
    assert as_transformers_reads(written(folder, raw)) == config
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert to_llama_config(json.loads((folder / "config.json").read_text())) == config


def test_a_config_of_no_family_is_refused():
    with pytest.raises(HydrajaxError, match="output: no family has both qkv_bias and qk_norm"):
        from_llama_config(LlamaConfig(9, 8, 8, 1, 1, 1, 8, qkv_bias=True, qk_norm=True), "output")
