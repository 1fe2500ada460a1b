"""Qwen3-Next, Qwen 3.5 and OLMo hybrid: the fields of their ``config.json`` that other families do not have."""

from __future__ import annotations

from functools import partial
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import FULL, integer, layer_types
from hydrajax.families.expert_families import qwen_experts, qwen_fields
from hydrajax.families.family import Family
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import GatedDelta, Recurrent

LINEAR = "linear_attention"


def _with_recurrent(c: LlamaConfig, types: list[str], recurrent: Recurrent, norms: str | None = None) -> LlamaConfig:
    """Return the configuration with these recurrent layers, which have these norms and no rotary embedding."""
    attention = LayerKind(c.sliding_window, c.rope_theta, c.rope_scaling)
    state = LayerKind(None, None, None, norms=norms, recurrent=recurrent)
    return c.with_kinds([attention if kind == FULL else state for kind in types])


def _gated_delta(raw: dict, names: str, **settings: Any) -> GatedDelta:
    return GatedDelta(
        kernel=integer(raw["linear_conv_kernel_dim"]),
        key_heads=integer(raw["linear_num_key_heads"]),
        value_heads=integer(raw["linear_num_value_heads"]),
        key_dim=integer(raw["linear_key_head_dim"]),
        value_dim=integer(raw["linear_value_head_dim"]),
        names=names,
        **settings,
    )


def _gated_delta_fields(c: LlamaConfig, names: str) -> dict[str, Any]:
    s = next((kind.recurrent for kind in c.kinds if kind.recurrent), None)
    if not isinstance(s, GatedDelta) or s.names != names:
        raise HydrajaxError("recurrent layers: got none of this family")
    return {
        "layer_types": [LINEAR if kind.recurrent else FULL for kind in c.kinds],
        "linear_conv_kernel_dim": s.kernel,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_key_head_dim": s.key_dim,
        "linear_value_head_dim": s.value_dim,
    }


# --- Qwen -------------------------------------------------------------------------------------------------------------


def _qwen(raw: dict, c: LlamaConfig, names: str) -> LlamaConfig:
    """Add what all hybrids of Qwen share."""
    every = integer(raw.get("full_attention_interval") or 4)
    types = layer_types(raw, c.n_layers, lambda i: LINEAR if (i + 1) % every else FULL, (LINEAR, FULL))
    c = c.replace(qk_norm=True, norm_offset=True, attention_gate=True)
    return _with_recurrent(c, types, _gated_delta(raw, names, norm_eps=c.norm_eps))


def _qwen_hybrid_fields(c: LlamaConfig, names: str) -> dict[str, Any]:
    own = _gated_delta_fields(c, names) | {"partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim}
    if c.any_experts is None:
        return own
    return qwen_fields(c) | {"shared_expert_intermediate_size": c.any_experts.shared_width} | own


def _qwen_shared_experts(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return qwen_experts(raw, c, shared_width=integer(raw["shared_expert_intermediate_size"]), shared_gate=True)


def _qwen3_next(raw: dict, c: LlamaConfig) -> LlamaConfig:
    c = _qwen(raw, c, "qwen3_next")
    return _qwen_shared_experts(raw, c) if integer(raw["num_experts"]) else c


def _qwen3_next_fields(c: LlamaConfig) -> dict[str, Any]:
    return ({} if c.any_experts else {"num_experts": 0}) | _qwen_hybrid_fields(c, "qwen3_next")


def _qwen3_5_moe_width(raw: dict) -> dict:
    """Return the fields with the width of an MLP, which no layer has: that of a token's experts together."""
    chosen = integer(raw["num_experts_per_tok"]) * integer(raw["moe_intermediate_size"])
    return {"intermediate_size": chosen + integer(raw["shared_expert_intermediate_size"])} | raw


def _qwen3_5_moe(raw: dict, c: LlamaConfig) -> LlamaConfig:
    always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _qwen_shared_experts(raw | always, _qwen(raw, c, "qwen3_5"))


_qwen3_5, _qwen3_5_fields = (partial(function, names="qwen3_5") for function in (_qwen, _qwen_hybrid_fields))


# --- OLMo -------------------------------------------------------------------------------------------------------------


def _olmo_hybrid_heads(raw: dict) -> dict:
    """Return the fields with the recurrent layers' sizes that follow from the others."""
    raw = {name: value for name, value in raw.items() if value is not None or name == "rope_theta"}
    heads = raw["num_attention_heads"]
    keys = raw.setdefault("linear_num_key_heads", heads)
    raw.setdefault("linear_num_value_heads", heads)
    key_dim = raw.setdefault("linear_key_head_dim", int(0.75 * raw["hidden_size"] / keys))
    raw.setdefault("linear_value_head_dim", 2 * key_dim)
    return raw


def _olmo_hybrid(raw: dict, c: LlamaConfig) -> LlamaConfig:
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta", c.rope_theta))
    if theta is None:  # as released
        c = c.replace(rope_theta=None, rope_scaling=None)
    types = layer_types(raw, c.n_layers, lambda i: FULL if i % 4 == 3 else LINEAR, (LINEAR, FULL))
    if FULL not in types and raw.get("layer_types") is None:
        types[-1] = FULL
    most = 2.0 if raw.get("linear_allow_neg_eigval", True) else 1.0
    delta = _gated_delta(raw, "olmo_hybrid", most_beta=most, norm_eps=1e-5)
    return _with_recurrent(c.replace(norms="after", qk_norm_all_heads=True), types, delta, norms="before")


def _olmo_hybrid_fields(c: LlamaConfig) -> dict[str, Any]:
    fields = _gated_delta_fields(c, "olmo_hybrid")
    negative = any(kind.recurrent and kind.recurrent.most_beta == 2.0 for kind in c.kinds)
    return fields | {"linear_allow_neg_eigval": negative, "rope_theta": c.rope_theta}


_DELTA = {
    "head_dim": 256, "max_position_embeddings": 32_768, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_SPARSE = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN3_NEXT = _DELTA | _SPARSE | {"num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True}
_QWEN3_5 = _DELTA | {"num_key_value_heads": 4}
_QWEN3_5_MOE = _DELTA | _SPARSE | {"num_experts_per_tok": 8, "num_experts": 256}
_OLMO_HYBRID = {"max_position_embeddings": 65_536, "linear_conv_kernel_dim": 4}
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM", "Qwen3-Next", _QWEN3_NEXT, _qwen3_next, _qwen3_next_fields, partial_rotary=True
)
QWEN3_5_TEXT = Family("Qwen3_5ForCausalLM", "Qwen 3.5, text", _QWEN3_5, _qwen3_5, _qwen3_5_fields, partial_rotary=True)
QWEN3_5_MOE_TEXT = Family(
    "Qwen3_5MoeForCausalLM", "Qwen 3.5 MoE, text", _QWEN3_5_MOE, _qwen3_5_moe, _qwen3_5_fields, _qwen3_5_moe_width,
    partial_rotary=True,
)  # fmt: skip
OLMO_HYBRID = Family(
    "OlmoHybridForCausalLM", "OLMo hybrid", _OLMO_HYBRID, _olmo_hybrid, _olmo_hybrid_fields, _olmo_hybrid_heads
)
