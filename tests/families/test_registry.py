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

from helpers.configs import as_transformers_reads, sizes, written
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_registry import FAMILIES, from_llama_config, to_llama_config
from hydrajax.models.llama_config import LlamaConfig, RopeScaling

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


def full(kind: str) -> dict:
    return {"model_type": kind} | FULL | ({} if kind == "llama" else WINDOW)


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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 1},
        {"max_window_layers": 2},
        {"layer_types": [FULL_ATTENTION, SLIDING, SLIDING]},
        {"layer_types": [SLIDING, FULL_ATTENTION, SLIDING]},
        {"layer_types": [SLIDING, SLIDING]},
        {"layer_types": ["chunked_attention"] * 3},
    ],
)
def test_windows_in_some_layers_only_are_refused(kind, fields):
    refused(full(kind) | fields, "here/config.json", "layer_types", "one kind for all layers")
    # Where the window is as long as the context the layers are alike.
    assert to_llama_config(full(kind) | fields | {"sliding_window": 5000}).sliding_window is None


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


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "mixtral", "LLAMA", "", None, 3, ["llama"]])
def test_another_family_is_refused_with_the_supported_ones(kind):
    pieces = ("'llama'", "'mistral'", "'qwen2'", "'qwen3'", "Vicuna", "Qwen 2, 2.5")
    refused(full("llama") | {"model_type": kind}, "here/config.json", "model_type", repr(kind), *pieces)


def test_a_file_without_a_family():
    refused(FULL, "model_type", "None", "'llama'", "'mistral'", "'qwen2'", "'qwen3'")


@pytest.mark.parametrize("kind", list(FAMILIES))
@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"attention_bias": True}, ("here/config.json", "attention_bias", "True", "false")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        *(
            ({field: {key: rope, "factor": 4.0}}, ("rope scaling", repr(rope), "'linear'", "'llama3'"))
            for field, key in (
                ("rope_scaling", "type"),
                ("rope_scaling", "rope_type"),
                ("rope_parameters", "rope_type"),
            )
            for rope in ("yarn", "dynamic", "longrope", "mrope")
        ),
        ({"mlp_bias": True}, ("mlp_bias", "True", "false")),
        ({"rope_parameters": "linear"}, ("rope_parameters", "'linear'", "an object")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "'linear'", "an object")),
        ({"rope_scaling": {"type": "linear"}}, ("factor", "missing")),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ("factor", "positive", "0")),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ("low_freq_factor", "missing")),
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
    """Of every family. A window is shorter than the context; a width is a multiple of the heads, as transformers'
    LLaMA insists even with a head_dim.
    """
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = kv_heads * group
    kind = draw(st.sampled_from(list(FAMILIES)))
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
        ),
        tied_lm_head=draw(st.booleans()),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=draw(window),
    )


@settings(max_examples=60, deadline=None)
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


def test_a_config_of_no_family_is_refused():
    with pytest.raises(HydrajaxError, match="output: no family has both qkv_bias and qk_norm"):
        from_llama_config(LlamaConfig(9, 8, 8, 1, 1, 1, 8, qkv_bias=True, qk_norm=True), "output")
