"""Gemma 4, text: the fields of its ``config.json`` that other families do not have."""

from __future__ import annotations

import dataclasses
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    hidden_act,
    hidden_activation,
    integer,
    layer_types,
    optional_float,
    rope_parameters,
    rope_scaling,
    types_of,
    unsupported,
    window_field,
)
from hydrajax.families.family import Family
from hydrajax.models.expert_settings import Experts
from hydrajax.models.llama_config import LayerKind, LlamaConfig

# transformers' defaults of a full layer's heads, and of the rotary embeddings.
GLOBAL_HEAD_DIM = 512
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
OF_LAYER = {"head_dim": "head_dim", "num_key_value_heads": "n_kv_heads"}  # fields of ``per_layer_config``, and ours


def _prepared(raw: dict) -> dict:
    return hidden_activation(raw) | {"rope_parameters": raw.get("rope_parameters") or ROPES}


def _sizes(raw: dict, types: list[str]) -> list[dict[str, int]]:
    """Return the head sizes of each layer, where they differ from the model's."""
    listed = raw.get("per_layer_config")
    if listed is None:
        full = {"head_dim": raw.get("global_head_dim", GLOBAL_HEAD_DIM)}
        heads = raw.get("num_global_key_value_heads")
        if heads is not None and raw.get("attention_k_eq_v", True):
            full["num_key_value_heads"] = heads
        listed = {str(i): full for i, kind in enumerate(types) if kind == FULL}
    if not isinstance(listed, dict) or not all(
        isinstance(of, dict) and of.keys() <= OF_LAYER.keys() for of in listed.values()
    ):
        raise unsupported("per_layer_config", listed, f"{' and '.join(OF_LAYER)} by number of layer")
    found: list[dict[str, int]] = [{} for _ in types]
    for place, fields in listed.items():
        if not 0 <= integer(place) < len(types):
            raise unsupported("per_layer_config", place, f"a layer from 0 to {len(types) - 1}")
        of_model = {name: integer(value) for name, value in fields.items() if value != raw[name]}
        found[integer(place)] = {OF_LAYER[name]: value for name, value in of_model.items()}
    return found


def _gemma4(raw: dict, c: LlamaConfig) -> LlamaConfig:
    """Add the settings of Gemma 4. In its assistant no layer has keys and values of its own."""
    if raw.get("use_bidirectional_attention") == "all":
        raise unsupported("use_bidirectional_attention", "all", "null or 'vision'")
    types = list(layer_types(raw, c.n_layers, lambda i: SLIDING if (i + 1) % 6 else FULL))
    types[-1] = FULL
    shared = integer(raw.get("num_kv_shared_layers") or 0)
    first_shared = c.n_layers - shared
    if shared < 0 or (first_shared and not set(types) <= set(types[: max(first_shared, 0)])):
        raise unsupported("num_kv_shared_layers", shared, "layers after one of each type that has keys and values")
    window, double = integer(raw["sliding_window"]), bool(raw.get("use_double_wide_mlp"))
    local = raw["rope_parameters"].get(SLIDING) or ROPES[SLIDING]
    ropes = {
        SLIDING: (float(local.get("rope_theta") or 10_000.0), rope_scaling(local, raw)),
        FULL: (c.rope_theta, c.rope_scaling),
    }
    kinds = [
        LayerKind(
            window if kind == SLIDING else None,
            *ropes[kind],
            _experts(raw),
            mlp_width=2 * c.mlp_width if double and i >= first_shared else None,
            shared_kv=i >= first_shared,
            values_are_keys=bool(raw.get("attention_k_eq_v")) and kind == FULL and i < first_shared,
            **sizes,
        )
        for i, (kind, sizes) in enumerate(zip(types, _sizes(raw, types), strict=True))
    ]
    per_layer = integer(raw.get("hidden_size_per_layer_input") or 0)
    rows = integer(raw.get("vocab_size_per_layer_input") or 0) if per_layer else 0
    if per_layer < 0 or (per_layer and rows < c.vocab_size):
        raise unsupported("vocab_size_per_layer_input", rows, f"at least vocab_size, {c.vocab_size}")
    c = c.replace(
        norms="both",
        qk_norm=True,
        value_norm=True,
        attention_scale=1.0,
        embedding_scale=c.width**0.5,
        logits_softcap=optional_float(raw.get("final_logit_softcapping")),
        layer_scale=True,
        per_layer_width=per_layer,
        per_layer_vocab=rows,
        names="gemma4",
    )
    return c.with_kinds(kinds)


def _experts(raw: dict) -> Experts | None:
    if not raw.get("enable_moe_block"):
        return None
    count, chosen, width = (integer(raw[name]) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    return Experts(count, chosen, width, normalized=True, with_mlp=True)


def _gemma4_fields(c: LlamaConfig) -> dict[str, Any]:
    """Return the fields of a configuration."""
    types, kinds = types_of(c), c.kinds
    if types[-1] != FULL or c.names != "gemma4":
        raise HydrajaxError("layers: got none of this family")
    by_type = dict(zip(types, kinds, strict=True))
    local, own = by_type.get(SLIDING), by_type[FULL]
    sizes = {
        str(i): {theirs: getattr(kind, ours) for theirs, ours in OF_LAYER.items() if getattr(kind, ours)}
        for i, kind in enumerate(kinds)
    }
    fields = {
        "hidden_activation": hidden_act(c),
        "final_logit_softcapping": c.logits_softcap,
        "layer_types": types,
        "sliding_window": window_field(c) or c.max_positions,
        "rope_parameters": {
            FULL: rope_parameters(own.rope_theta, own.rope_scaling),
            SLIDING: ROPES[SLIDING] if local is None else rope_parameters(local.rope_theta, local.rope_scaling),
        },
        "rope_scaling": None,
        "per_layer_config": {place: found for place, found in sizes.items() if found},
        "num_kv_shared_layers": sum(kind.shared_kv for kind in kinds),
        "use_double_wide_mlp": any(kind.mlp_width for kind in kinds),
        "attention_k_eq_v": any(kind.values_are_keys for kind in kinds),
        "hidden_size_per_layer_input": c.per_layer_width,
        "vocab_size_per_layer_input": c.per_layer_vocab,
        "enable_moe_block": c.any_experts is not None,
    }
    if e := c.any_experts:
        fields |= {"num_experts": e.count, "top_k_experts": e.per_token, "moe_intermediate_size": e.width}
    return fields


_GEMMA4 = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "max_position_embeddings": 131_072, "sliding_window": 512, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}  # fmt: skip
_UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
GEMMA4_TEXT = Family("Gemma4ForCausalLM", "Gemma 4, text", _GEMMA4, _gemma4, _gemma4_fields, _prepared)
GEMMA4_UNIFIED_TEXT = dataclasses.replace(
    GEMMA4_TEXT, architecture="Gemma4UnifiedForCausalLM", models="Gemma 4 12B, text", defaults=_GEMMA4 | _UNIFIED
)
