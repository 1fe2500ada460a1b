"""LFM2 and LFM3: the fields of their ``config.json`` that other families do not have."""

from __future__ import annotations

from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    integer,
    layer_types,
    rope_parameters,
    rope_scaling,
    unsupported,
    window_field,
    window_of,
)
from hydrajax.families.expert_families import dense_layers, expert_fields, experts_of, with_experts
from hydrajax.families.family import Family
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import ShortConv

CONV = "conv"
_WITHOUT, _WITH_NORMS_AFTER = "lfm3", "lfm3 with norms after"  # names of LFM3's tensors


def _with_convolutions(raw: dict, c: LlamaConfig, types: list[str], local: LayerKind | None = None) -> LlamaConfig:
    """Return the configuration with layers of these types; ``local`` is that of layers with a window."""
    groups = c.n_kv_heads if c.width % c.n_kv_heads == 0 else 1
    conv = ShortConv(integer(raw["conv_L_cache"]), c.width, groups, bool(raw["conv_bias"]))
    kinds = {
        FULL: LayerKind(None, c.rope_theta, c.rope_scaling),
        SLIDING: local,
        CONV: LayerKind(None, None, None, recurrent=conv),
    }
    return c.replace(qk_norm=True).with_kinds([kinds[kind] for kind in types])


def _conv_fields(c: LlamaConfig, *names: str) -> dict[str, Any]:
    """Return the fields that all LFMs share, for a configuration with one of these forms of tensor names."""
    if c.names not in names:
        raise HydrajaxError(f"names: got '{c.names}', expected one of this family")
    full = (None, c.rope_theta, c.rope_scaling)
    types = [FULL if (kind.sliding_window, kind.rope_theta, kind.rope_scaling) == full else SLIDING for kind in c.kinds]
    types = [CONV if kind.recurrent else name for kind, name in zip(c.kinds, types, strict=True)]
    fields = {"norm_eps": c.norm_eps, "layer_types": types}
    conv = next((kind.recurrent for kind in c.kinds if kind.recurrent), None)
    if isinstance(conv, ShortConv):
        fields |= {"conv_L_cache": conv.kernel, "conv_bias": conv.bias}
    return fields


# --- LFM2 -------------------------------------------------------------------------------------------------------------


def _lfm2_moe_names(raw: dict) -> dict:
    """Return the fields with LLaMA's names."""
    tied = raw.get("tie_embedding", raw["tie_word_embeddings"])
    return raw | {"rms_norm_eps": raw["norm_eps"], "tie_word_embeddings": tied}


def _lfm2_names(raw: dict) -> dict:
    """Return the fields with LLaMA's names and the width of its MLPs."""
    raw = _lfm2_moe_names(raw)
    width, multiple = integer(raw.get("block_ff_dim", raw["intermediate_size"])), integer(raw["block_multiple_of"])
    if raw["block_auto_adjust_ff_dim"]:
        if multiple < 1:
            raise unsupported("block_multiple_of", multiple, "1 or more")
        width = -(-int(float(raw["block_ffn_dim_multiplier"]) * int(2 * width / 3)) // multiple) * multiple
    return raw | {"intermediate_size": width}


def _lfm2(raw: dict, c: LlamaConfig) -> LlamaConfig:
    attends = raw["full_attn_idxs"]
    types = layer_types(raw, c.n_layers, lambda i: FULL if attends is None or i in attends else CONV, (CONV, FULL))
    return _with_convolutions(raw, c.replace(names="lfm2"), types)


def _lfm2_fields(c: LlamaConfig) -> dict[str, Any]:
    return _conv_fields(c, "lfm2") | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(raw: dict, c: LlamaConfig) -> LlamaConfig:
    if raw["layer_types"] is None:
        raise unsupported("layer_types", None, f"{CONV} or {FULL} for each layer")
    experts = experts_of(
        raw, "num_experts", "moe_intermediate_size", scores="sigmoid", choice_bias=bool(raw["use_expert_bias"]),
        normalized=bool(raw["norm_topk_prob"]), scale=float(raw["routed_scaling_factor"]), tiny=1e-6,
    )  # fmt: skip
    return with_experts(_lfm2(raw, c), experts, range(min(c.n_layers, integer(raw["num_dense_layers"]))))


def _lfm2_moe_fields(c: LlamaConfig) -> dict[str, Any]:
    experts = expert_fields(c, "num_experts", "moe_intermediate_size")
    return (
        _conv_fields(c, "lfm2")
        | experts
        | {
            "num_dense_layers": len(dense_layers(c)),
            "use_expert_bias": c.any_experts.choice_bias,
            "norm_topk_prob": c.any_experts.normalized,
            "routed_scaling_factor": c.any_experts.scale,
        }
    )


# --- LFM3 -------------------------------------------------------------------------------------------------------------


def _lfm3_names(raw: dict) -> dict:
    """Return the fields with LLaMA's names and rotary embeddings by type of layer."""
    raw = {"norm_eps": 1e-5} | raw
    return _lfm2_moe_names(raw) | {"rope_parameters": raw.get("rope_parameters") or _LFM3_ROPES}


def _lfm3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    def default(i: int) -> str:
        return FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV

    types, rope = layer_types(raw, c.n_layers, default, (CONV, FULL, SLIDING)), raw["rope_parameters"]
    local = rope.get(SLIDING) or rope
    local = LayerKind(
        window_of(raw, c.max_positions), float(local.get("rope_theta") or c.rope_theta), rope_scaling(local, raw)
    )
    both = bool(raw["use_sandwich_norm"])
    c = c.replace(
        norms="both" if both else "before",
        head_gate=bool(raw["use_attention_gate"]),
        names=_WITH_NORMS_AFTER if both else _WITHOUT,
    )
    return _with_convolutions(raw, c, types, local)


def _lfm3_fields(c: LlamaConfig) -> dict[str, Any]:
    fields = _conv_fields(c, _WITHOUT, _WITH_NORMS_AFTER)
    by_type = {FULL: c, SLIDING: c} | dict(zip(fields["layer_types"], c.kinds, strict=True))
    return fields | {
        "sliding_window": window_field(c) or c.max_positions,
        "use_sandwich_norm": c.norms == "both",
        "use_attention_gate": c.head_gate,
        "rope_scaling": None,
        "rope_parameters": {
            kind: rope_parameters(by_type[kind].rope_theta, by_type[kind].rope_scaling) for kind in (FULL, SLIDING)
        },
    }


_LFM = {
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "tie_word_embeddings": True, "conv_L_cache": 3,
    "conv_bias": False,
}  # fmt: skip
_LFM2_MOE = _LFM | {
    "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "full_attn_idxs": None, "layer_types": None,
    "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32,
    "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
_LFM2 = _LFM | {
    "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "intermediate_size": 12_288, "full_attn_idxs": None,
    "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_LFM3 = _LFM | {
    "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7, "sliding_window": 256, "use_sandwich_norm": True,
    "use_attention_gate": True,
}  # fmt: skip
_LFM3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
LFM2 = Family("Lfm2ForCausalLM", "LFM2", _LFM2, _lfm2, _lfm2_fields, _lfm2_names)
LFM2_MOE = Family("Lfm2MoeForCausalLM", "LFM2 MoE", _LFM2_MOE, _lfm2_moe, _lfm2_moe_fields, _lfm2_moe_names)
LFM3 = Family("Lfm3ForCausalLM", "LFM3", _LFM3, _lfm3, _lfm3_fields, _lfm3_names)
