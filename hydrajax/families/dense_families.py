"""Gemma, OLMo, EXAONE, Granite, SmolLM 3 and Phi: fields of ``config.json`` that other families do not have."""

from __future__ import annotations

import math
from typing import Any

from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    hidden_act,
    hidden_activation,
    layer_types,
    optional_float,
    rope_parameters,
    rope_scaling,
    types_of,
    unsupported,
    window_field,
    window_of,
    with_windows,
)
from hydrajax.families.family import Family
from hydrajax.models.llama_config import LayerKind, LlamaConfig


def _attention_scale(scale: float, c: LlamaConfig) -> float | None:
    """Return the scale of the scores; None for the usual one."""
    return None if math.isclose(scale, c.head_dim**-0.5, rel_tol=1e-12) else scale


def _local_rope(raw: dict) -> dict:
    """Return ``rope_parameters`` of the layers with a window, where they are listed by type."""
    return (raw.get("rope_parameters") or {}).get(SLIDING) or {}


# --- Gemma ------------------------------------------------------------------------------------------------------------


def _gemma(raw: dict, c: LlamaConfig) -> LlamaConfig:
    """Add the settings of both Gemmas."""
    if raw.get("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention", True, "false")
    scalar = float(raw["query_pre_attn_scalar"])
    if not scalar > 0:
        raise unsupported("query_pre_attn_scalar", scalar, "a positive number")
    return c.replace(
        norms="both",
        norm_offset=True,
        embedding_scale=c.width**0.5,
        attention_scale=_attention_scale(scalar**-0.5, c),
        logits_softcap=optional_float(raw.get("final_logit_softcapping")),
    )


def _gemma_fields(c: LlamaConfig) -> dict[str, Any]:
    return {
        "hidden_activation": hidden_act(c),
        "query_pre_attn_scalar": c.head_dim if c.attention_scale is None else round(c.attention_scale**-2),
        "final_logit_softcapping": c.logits_softcap,
        "sliding_window": window_field(c),
        "layer_types": types_of(c),
    }


def _gemma2(raw: dict, c: LlamaConfig) -> LlamaConfig:
    c = _gemma(raw, c).replace(attention_softcap=optional_float(raw.get("attn_logit_softcapping")))
    types = layer_types(raw, c.n_layers, lambda i: FULL if i % 2 else SLIDING)
    return with_windows(c, types, window_of(raw, c.max_positions))


def _gemma2_fields(c: LlamaConfig) -> dict[str, Any]:
    return _gemma_fields(c) | {"attn_logit_softcapping": c.attention_softcap}


def _gemma3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    c, local = _gemma(raw, c).replace(qk_norm=True), _local_rope(raw)
    theta = float(local.get("rope_theta") or raw.get("rope_local_base_freq") or 10_000.0)
    every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    types = layer_types(raw, c.n_layers, lambda i: SLIDING if (i + 1) % every else FULL)
    return with_windows(c, types, window_of(raw, c.max_positions), (theta, rope_scaling(local, raw)))


def _gemma3_fields(c: LlamaConfig) -> dict[str, Any]:
    # Layers whose window is not shorter than the context have none, and keep their own rotary embedding.
    types = [FULL if (k.rope_theta, k.rope_scaling) == (c.rope_theta, c.rope_scaling) else SLIDING for k in c.kinds]
    local = next((kind for kind, name in zip(c.kinds, types, strict=True) if name == SLIDING), None)
    types = [SLIDING if kind.sliding_window else name for kind, name in zip(c.kinds, types, strict=True)]
    theta = c.rope_theta if local is None else local.rope_theta
    return _gemma_fields(c) | {
        "layer_types": types,
        "rope_local_base_freq": theta,
        "sliding_window": window_field(c) or c.max_positions,
    }


# --- OLMo, EXAONE -----------------------------------------------------------------------------------------------------


def _olmo2(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return c.replace(norms="after", qk_norm_all_heads=True)


def _olmo3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    c, local = _olmo2(raw, c), _local_rope(raw)
    theta = float(local.get("rope_theta") or raw.get("rope_theta") or c.rope_theta)
    types = layer_types(raw, c.n_layers, lambda i: SLIDING if (i + 1) % 4 else FULL)
    return with_windows(c, types, window_of(raw, c.max_positions), (theta, rope_scaling(local, raw)))


def _olmo3_fields(c: LlamaConfig) -> dict[str, Any]:
    """Return both forms of the rotary embeddings: transformers 4 reads ``rope_scaling`` for the layers without a window
    alone, transformers 5 ``rope_parameters``.
    """
    types = [SLIDING if kind.sliding_window or kind.rope_scaling != c.rope_scaling else FULL for kind in c.kinds]
    by_type = dict(zip(types, c.kinds, strict=True))
    ropes = {name: rope_parameters(kind.rope_theta, kind.rope_scaling) for name, kind in by_type.items()}
    return {"sliding_window": window_field(c) or c.max_positions, "layer_types": types, "rope_parameters": ropes}


def _exaone4(raw: dict, c: LlamaConfig) -> LlamaConfig:
    """Add the windows; where there are some, the other layers have no rotary embedding."""
    windowed, every = raw.get("sliding_window") is not None, raw.get("sliding_window_pattern")
    if raw.get("layer_types") is None and windowed and (type(every) is not int or every < 1):
        raise unsupported("sliding_window_pattern", every, "a positive integer, or layer_types")
    types = layer_types(raw, c.n_layers, lambda i: SLIDING if windowed and (i + 1) % every else FULL)
    if not windowed and SLIDING in types:
        raise unsupported("sliding_window", None, f"a number for the layers of type {SLIDING}")
    rope = c.rope_theta, c.rope_scaling
    full = LayerKind(None, *((None, None) if windowed else rope))
    kinds = {FULL: full, SLIDING: LayerKind(window_of(raw, c.max_positions), *rope)}
    return c.replace(norms="after", qk_norm=True).with_kinds(kinds[kind] for kind in types)


def _exaone4_fields(c: LlamaConfig) -> dict[str, Any]:
    plain = all(kind.rope_theta and not kind.sliding_window for kind in c.kinds)
    return {
        "sliding_window": None if plain else window_field(c) or c.max_positions,
        "layer_types": [SLIDING if kind.rope_theta and not plain else FULL for kind in c.kinds],
    }


# --- Granite, SmolLM 3, Phi -------------------------------------------------------------------------------------------


def granite(raw: dict, c: LlamaConfig) -> LlamaConfig:
    """Add the multipliers."""
    return c.replace(
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        attention_scale=_attention_scale(float(raw.get("attention_multiplier", 1.0)), c),
        logits_divisor=float(raw.get("logits_scaling", 1.0)),
    )


def granite_fields(c: LlamaConfig) -> dict[str, Any]:
    """Return the fields of `granite`."""
    return {
        "embedding_multiplier": c.embedding_scale,
        "residual_multiplier": c.residual_scale,
        "attention_multiplier": c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale,
        "logits_scaling": c.logits_divisor,
    }


def _smollm3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    """Add the layers without rotary embedding, which alone have a window where there is one."""
    every, window = raw.get("no_rope_layer_interval", 4), window_of(raw, c.max_positions)
    types = layer_types(raw, c.n_layers, lambda i: "")
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        rotated = [(i + 1) % every != 0 for i in range(c.n_layers)]
    elif not isinstance(rotated, list) or len(rotated) < c.n_layers:
        raise unsupported("no_rope_layers", rotated, f"0 or 1 for each of {c.n_layers} layers")
    windowed = bool(raw.get("use_sliding_window"))
    kinds = [
        LayerKind(
            window if kind == SLIDING or (kind == "" and windowed and not rotates) else None,
            c.rope_theta if rotates else None,
            c.rope_scaling if rotates else None,
        )
        for kind, rotates in zip(types, rotated, strict=False)
    ]
    return c.with_kinds(kinds)


def _smollm3_fields(c: LlamaConfig) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(kind.rope_theta is not None) for kind in c.kinds],
        "use_sliding_window": window_field(c) is not None,
        "sliding_window": window_field(c),
        "layer_types": types_of(c),
    }


def _phi3_rope(raw: dict) -> dict:
    """Return the fields with the later name of longrope, which has the model's original context."""
    names = [name for name in ("rope_scaling", "rope_parameters") if raw.get(name)]
    if not names or (raw[names[0]].get("rope_type") or raw[names[0]].get("type") or "default") == "default":
        return raw
    scaling = raw[names[0]]
    kind = scaling.get("rope_type") or scaling.get("type")
    return raw | {
        names[0]: scaling
        | {
            "rope_type": "longrope" if kind in ("su", "yarn") else kind,
            "original_max_position_embeddings": raw["original_max_position_embeddings"],
        }
    }


def _phi3(raw: dict, c: LlamaConfig) -> LlamaConfig:
    return c.replace(fused_projections=True, sliding_window=window_of(raw, c.max_positions))


def _phi3_fields(c: LlamaConfig) -> dict[str, Any]:
    scaling = c.rope_scaling
    return {
        "sliding_window": c.sliding_window,
        "original_max_position_embeddings": c.max_positions if scaling is None else scaling.original_max_position,
        "partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim,
    }


_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA2 = _GEMMA | {
    "max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
_GEMMA3 = _GEMMA | {"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0}
_OLMO3 = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}
_SMOLLM3 = {
    "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
}  # fmt: skip
_PHI3 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
GEMMA2 = Family("Gemma2ForCausalLM", "Gemma 2", _GEMMA2, _gemma2, _gemma2_fields, hidden_activation)
GEMMA3_TEXT = Family("Gemma3ForCausalLM", "Gemma 3, text", _GEMMA3, _gemma3, _gemma3_fields, hidden_activation)
OLMO2 = Family("Olmo2ForCausalLM", "OLMo 2", {"rms_norm_eps": 1e-5}, _olmo2)
OLMO3 = Family("Olmo3ForCausalLM", "OLMo 3", _OLMO3, _olmo3, _olmo3_fields)
EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "EXAONE 4",
    {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    _exaone4,
    _exaone4_fields,
)
GRANITE = Family("GraniteForCausalLM", "Granite 3", {}, granite, granite_fields)
SMOLLM3 = Family("SmolLM3ForCausalLM", "SmolLM 3", _SMOLLM3, _smollm3, _smollm3_fields)
PHI3 = Family("Phi3ForCausalLM", "Phi 3, 4", _PHI3, _phi3, _phi3_fields, _phi3_rope, partial_rotary=True)
