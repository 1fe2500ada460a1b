"""LLaMA, Mistral, Qwen and their close relatives: fields of ``config.json`` that other families do not have."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    default_rope,
    integer,
    layer_types,
    optional_float,
    rope_parameters,
    types_of,
    unsupported,
    window_field,
    window_of,
    with_windows,
)
from hydrajax.families.family import Family
from hydrajax.models.llama_config import LlamaConfig


def _mistral(raw: dict, c: LlamaConfig) -> LlamaConfig:
    window = window_of(raw, c.max_positions)
    if window is None or raw.get("layer_types") is None:
        return c.replace(sliding_window=window)
    return with_windows(c, layer_types(raw, c.n_layers, lambda i: SLIDING), window)


def _ministral3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    beta = (raw.get("rope_parameters") or raw["rope_scaling"]).get("llama_4_scaling_beta")
    if beta and (c.rope_scaling is None or c.rope_scaling.kind not in ("yarn", "llama3")):
        raise unsupported("llama_4_scaling_beta", beta, "none without YaRN")
    if beta:
        c = c.replace(rope_scaling=dataclasses.replace(c.rope_scaling, query_beta=float(beta)))
    return c.replace(sliding_window=window_of(raw, c.max_positions))


def _ministral3_fields(c: LlamaConfig) -> dict[str, Any]:
    rope = rope_parameters(c.rope_theta, c.rope_scaling)
    rope |= {"llama_4_scaling_beta": c.rope_scaling.query_beta if c.rope_scaling else 0.0}
    return {"sliding_window": c.sliding_window, "rope_parameters": rope, "rope_scaling": None}


def _seed_oss(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return c.replace(qkv_bias=bool(raw["attention_bias"]), out_bias=bool(raw["attention_out_bias"]))


def _hunyuan_rope(raw: dict) -> dict:
    """Return the fields with the theta of the rotary embedding that a fixed alpha stretches."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return raw
    size = integer(raw.get("head_dim") or integer(raw["hidden_size"]) // integer(raw["num_attention_heads"]))
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    theta *= float(rope["alpha"]) ** (size / (size - 2))
    return raw | {"rope_parameters": None, "rope_scaling": None, "rope_theta": theta}


def _hunyuan(raw: dict, c: LlamaConfig) -> LlamaConfig:
    biased = bool(raw.get("attention_bias"))
    return c.replace(qkv_bias=biased, out_bias=biased, qk_norm=True, norm_after_rope=True, names="hunyuan_v1_dense")


def _nanochat_activation(raw: dict) -> dict:
    if raw["hidden_act"] != "relu2":
        raise unsupported("hidden_act", raw["hidden_act"], "'relu2'")
    return raw | {"hidden_act": "silu"}


def _nanochat(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return c.replace(
        norm_scales="none",
        embedding_norm=True,
        qk_norm=True,
        norm_after_rope=True,
        rope_reversed=True,
        activation="relu2",
        logits_softcap=optional_float(raw.get("final_logit_softcapping")),
        names="nanochat",
    )


def _mistral_fields(c: LlamaConfig) -> dict[str, Any]:
    return {"sliding_window": window_field(c)} | ({"layer_types": types_of(c)} if c.layer_kinds else {})


def _qwen2(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return _switched_windows(raw, c.replace(qkv_bias=True))


def _qwen3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return _switched_windows(raw, c.replace(qk_norm=True))


def _switched_windows(raw: dict, c: LlamaConfig) -> LlamaConfig:
    """Add the windows of ``layer_types``, or of the layers from ``max_window_layers`` on."""
    window = window_of(raw, c.max_positions) if raw.get("use_sliding_window") else None
    if window is None:
        return c
    if raw.get("layer_types") is None:  # transformers' default of max_window_layers is 28
        first = min(integer(raw.get("max_window_layers", 28)), c.n_layers)
        if first in (0, c.n_layers):
            return c if first else c.replace(sliding_window=window)
    return with_windows(c, layer_types(raw, c.n_layers, lambda i: FULL if i < first else SLIDING), window)


def _switched_fields(c: LlamaConfig) -> dict[str, Any]:
    window = window_field(c)
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    if not c.layer_kinds:
        return fields | {"max_window_layers": 0 if window else c.n_layers}
    types = types_of(c)
    first = types.index(SLIDING) if window else c.n_layers
    return fields | {"max_window_layers": first, "layer_types": types}


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
_LONG_YARN = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MINISTRAL3 = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
}  # fmt: skip
_SEED = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288, "attention_bias": True,
    "attention_out_bias": False,
}  # fmt: skip
LLAMA = Family("LlamaForCausalLM", "LLaMA 1, 2, 3, 3.1, 3.2, Vicuna, TinyLlama, CodeLlama")
MISTRAL = Family("MistralForCausalLM", "Mistral", _MISTRAL, _mistral, _mistral_fields)
QWEN2 = Family("Qwen2ForCausalLM", "Qwen 2, 2.5", _QWEN, _qwen2, _switched_fields)
# Its MTP module is a draft (`hydrajax.formats.mtp_format`). Biases are Qwen 2's, whatever attention_bias says.
MIMO = Family(
    "MiMoForCausalLM", "MiMo 7B", _QWEN, _qwen2, _switched_fields, lambda raw: raw | {"attention_bias": False}
)
QWEN3 = Family("Qwen3ForCausalLM", "Qwen 3", _QWEN | {"head_dim": 128}, _qwen3, _switched_fields)
SEED_OSS = Family(
    "SeedOssForCausalLM",
    "Seed-OSS",
    _SEED,
    _seed_oss,
    lambda c: {"attention_bias": c.qkv_bias, "attention_out_bias": c.out_bias},
    attention_bias=True,
)
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    "Ministral 3, text",
    _MINISTRAL3,
    _ministral3,
    _ministral3_fields,
    partial(default_rope, rope=_LONG_YARN),
)
HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "HunYuan, dense",
    {"rms_norm_eps": 1e-5},
    _hunyuan,
    lambda c: {"attention_bias": c.qkv_bias},
    _hunyuan_rope,
    attention_bias=True,
)
NANOCHAT = Family(
    "NanoChatForCausalLM",
    "nanochat",
    {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    _nanochat,
    lambda c: {"final_logit_softcapping": c.logits_softcap},
    _nanochat_activation,
)
