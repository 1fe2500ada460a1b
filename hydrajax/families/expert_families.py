"""Mixtral, Qwen and GLM mixtures of experts and OLMoE: the fields of their ``config.json`` that others do not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    default_rope,
    integer,
    layer_types,
    rope_parameters,
    types_of,
    unsupported,
    window_field,
    window_of,
    with_windows,
)
from hydrajax.families.family import Family
from hydrajax.models.expert_settings import Experts
from hydrajax.models.llama_config import LlamaConfig

MOST_EXPERTS = 4096  # a slip in their number must not take all memory where every expert is listed


def experts_of(raw: dict, count: str, width: str, **settings: Any) -> Experts:
    """Return the experts of a file whose fields for their number and their width have these names."""
    number = integer(raw.get("num_local_experts", raw[count]))  # transformers 5 writes this name for Qwen 3
    if number > MOST_EXPERTS:
        raise unsupported(count, number, f"at most {MOST_EXPERTS}")
    try:
        return Experts(number, integer(raw["num_experts_per_tok"]), integer(raw[width]), **settings)
    except HydrajaxError as error:
        raise HydrajaxError(f"{error} ({count}, num_experts_per_tok, {width} and the like)") from None


def with_experts(c: LlamaConfig, experts: Experts, dense: Iterable[int]) -> LlamaConfig:
    """Return the configuration with experts in all layers but the ``dense`` ones."""
    if c.n_layers > MOST_LAYERS:
        raise unsupported("num_hidden_layers", c.n_layers, f"at most {MOST_LAYERS} layers with experts")
    dense = set(dense)
    kinds = (dataclasses.replace(kind, experts=None if i in dense else experts) for i, kind in enumerate(c.kinds))
    return c.with_kinds(kinds)


def dense_layers(c: LlamaConfig) -> list[int]:
    return [i for i, kind in enumerate(c.kinds) if kind.experts is None]


def expert_fields(c: LlamaConfig, count: str, width: str) -> dict[str, Any]:
    """Return the fields that all mixtures of experts share."""
    e = _of(c)
    return {count: e.count, width: e.width, "num_experts_per_tok": e.per_token}


def _of(c: LlamaConfig) -> Experts:
    if c.any_experts is None:
        raise HydrajaxError("experts: got none")
    return c.any_experts


# --- Mixtral and OLMoE ------------------------------------------------------------------------------------------------


def _mixtral(raw: dict, c: LlamaConfig) -> LlamaConfig:
    experts = experts_of(raw, "num_local_experts", "intermediate_size", normalized=True, block="block_sparse_moe")
    return c.replace(sliding_window=window_of(raw, c.max_positions), experts=experts)


def _mixtral_fields(c: LlamaConfig) -> dict[str, Any]:
    return expert_fields(c, "num_local_experts", "intermediate_size") | {"sliding_window": c.sliding_window}


def _olmoe(raw: dict, c: LlamaConfig) -> LlamaConfig:
    if raw.get("clip_qkv") is not None:
        raise unsupported("clip_qkv", raw["clip_qkv"], "null")
    experts = experts_of(raw, "num_experts", "intermediate_size", normalized=bool(raw.get("norm_topk_prob")))
    return c.replace(qk_norm_all_heads=True, experts=experts)


def _olmoe_fields(c: LlamaConfig) -> dict[str, Any]:
    return expert_fields(c, "num_experts", "intermediate_size") | {"norm_topk_prob": _of(c).normalized}


# --- Qwen -------------------------------------------------------------------------------------------------------------


def qwen_experts(raw: dict, c: LlamaConfig, **settings: Any) -> LlamaConfig:
    """Add the experts of every ``decoder_sparse_step``-th layer that is not one of ``mlp_only_layers``."""
    experts = experts_of(
        raw, "num_experts", "moe_intermediate_size", normalized=bool(raw.get("norm_topk_prob")), **settings
    )
    step, dense = integer(raw.get("decoder_sparse_step") or 1), set(map(integer, raw.get("mlp_only_layers") or ()))
    if step < 1:
        raise unsupported("decoder_sparse_step", step, "1 or more")
    return with_experts(c, experts, (i for i in range(min(c.n_layers, MOST_LAYERS)) if i in dense or (i + 1) % step))


def qwen_fields(c: LlamaConfig) -> dict[str, Any]:
    return expert_fields(c, "num_experts", "moe_intermediate_size") | {
        "norm_topk_prob": _of(c).normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense_layers(c),
        "use_sliding_window": window_field(c) is not None,
        "sliding_window": window_field(c),
    }


def _qwen2_moe(raw: dict, c: LlamaConfig) -> LlamaConfig:
    c = c.replace(qkv_bias=bool(raw["qkv_bias"]))
    window = window_of(raw, c.max_positions) if raw.get("use_sliding_window") else None
    if window is not None:
        first = integer(raw["max_window_layers"])
        types = layer_types(raw, c.n_layers, lambda i: SLIDING if i % 2 == 0 and i < first else FULL)
        c = with_windows(c, types, window)
    return qwen_experts(raw, c, shared_width=integer(raw["shared_expert_intermediate_size"]), shared_gate=True)


def _qwen2_moe_fields(c: LlamaConfig) -> dict[str, Any]:
    e = _of(c)
    return qwen_fields(c) | {
        "qkv_bias": c.qkv_bias,
        "shared_expert_intermediate_size": e.shared_width,
        "layer_types": types_of(c),
    }


def _qwen3_moe(raw: dict, c: LlamaConfig) -> LlamaConfig:
    window = window_of(raw, c.max_positions) if raw.get("use_sliding_window") else None
    return qwen_experts(raw, c.replace(qk_norm=True, sliding_window=window))


# --- GLM --------------------------------------------------------------------------------------------------------------


def grouped_experts(raw: dict, shared_width: int) -> Experts:
    """Return experts with the router of GLM and Nemotron-H."""
    return experts_of(
        raw, "n_routed_experts", "moe_intermediate_size", scores="sigmoid", choice_bias=True,
        normalized=bool(raw["norm_topk_prob"]), groups=integer(raw["n_group"]),
        chosen_groups=integer(raw["topk_group"]), scale=float(raw["routed_scaling_factor"]), shared_width=shared_width,
    )  # fmt: skip


def grouped_fields(c: LlamaConfig) -> dict[str, Any]:
    """Return the fields of `grouped_experts`."""
    e = _of(c)
    return expert_fields(c, "n_routed_experts", "moe_intermediate_size") | {
        "norm_topk_prob": e.normalized,
        "n_group": e.groups,
        "topk_group": e.chosen_groups,
        "routed_scaling_factor": e.scale,
    }


def _glm4_moe(raw: dict, c: LlamaConfig) -> LlamaConfig:
    experts = grouped_experts(raw, integer(raw["moe_intermediate_size"]) * integer(raw["n_shared_experts"]))
    c = c.replace(qkv_bias=bool(raw.get("attention_bias")), qk_norm=bool(raw.get("use_qk_norm")))
    return with_experts(c, experts, range(min(c.n_layers, integer(raw["first_k_dense_replace"]))))


def _glm4_moe_fields(c: LlamaConfig) -> dict[str, Any]:
    e = _of(c)
    return grouped_fields(c) | {
        "attention_bias": c.qkv_bias,
        "use_qk_norm": c.qk_norm,
        "n_shared_experts": e.shared_width // e.width,
        "first_k_dense_replace": len(dense_layers(c)),
        "partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim,
    }


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


def _gpt_oss(raw: dict, c: LlamaConfig) -> LlamaConfig:
    swiglu = tuple(float(raw[f"swiglu_{name}"]) for name in ("alpha", "limit"))
    experts = experts_of(raw, "num_experts", "intermediate_size", normalized=True, biases=True, swiglu=swiglu)
    biased = bool(raw["attention_bias"])
    c = c.replace(qkv_bias=biased, out_bias=biased, attention_sinks=True, names="gpt_oss")
    types = layer_types(raw, c.n_layers, lambda i: FULL if i % 2 else SLIDING)
    return with_experts(with_windows(c, types, window_of(raw, c.max_positions)), experts, ())


def _gpt_oss_fields(c: LlamaConfig) -> dict[str, Any]:
    e = _of(c)
    alpha, limit = e.swiglu or (None, None)
    return expert_fields(c, "num_local_experts", "intermediate_size") | {
        "attention_bias": c.qkv_bias,
        "swiglu_alpha": alpha,
        "swiglu_limit": limit,
        "sliding_window": window_field(c),
        "layer_types": types_of(c),
        "rope_parameters": rope_parameters(c.rope_theta, c.rope_scaling),
    }


_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_MIXTRAL = {
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_OLMOE = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
_QWEN2 = {
    "num_key_value_heads": 16, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
    "qkv_bias": True,
}  # fmt: skip
_QWEN3 = {
    "num_key_value_heads": 4, "max_position_embeddings": 32_768, "sliding_window": 4096, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128,
}  # fmt: skip
_GLM4 = {
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
_GPT_OSS = {
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0, "sliding_window": 128, "num_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "attention_bias": True,
}  # fmt: skip
MIXTRAL = Family("MixtralForCausalLM", "Mixtral", _MIXTRAL, _mixtral, _mixtral_fields)
QWEN2_MOE = Family("Qwen2MoeForCausalLM", "Qwen 1.5 and 2 MoE", _QWEN2, _qwen2_moe, _qwen2_moe_fields)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "Qwen 3 MoE", _QWEN3, _qwen3_moe, qwen_fields)
OLMOE = Family("OlmoeForCausalLM", "OLMoE", _OLMOE, _olmoe, _olmoe_fields)
GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt-oss",
    _GPT_OSS,
    _gpt_oss,
    _gpt_oss_fields,
    prepare=partial(default_rope, rope=_YARN),
    attention_bias=True,
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM", "GLM 4.5, 4.6", _GLM4, _glm4_moe, _glm4_moe_fields, partial_rotary=True, attention_bias=True
)
