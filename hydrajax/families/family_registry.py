"""The supported model families, and translation between their ``config.json`` and `LlamaConfig`.

A family is one entry of the group ``families`` of `hydrajax.plugins`, imported when it is named. The fields are parsed
here rather than by transformers' configuration classes, which the tests compare with: those list every layer, so that a
slip in a number takes all memory, and accept fields that we do not implement.
"""

from __future__ import annotations

from typing import Any

from hydrajax import plugins
from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    activation,
    hidden_act,
    integer,
    rope_fields,
    rope_scaling,
    unsupported,
)
from hydrajax.families.family import Family
from hydrajax.models.llama_config import LlamaConfig

# By model_type. A configuration is written as the first one that fits.
FAMILIES = plugins.Group("families")
# Multimodal models that are used without their vision tower, and the families of their text parts.
TEXT_PARTS = {
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "muse_glimmer": "muse_glimmer_text",
}
# Parts of other families that are not implemented.
_VISION = "its vision tower"
NOT_IMPLEMENTED = {
    "gemma3": f"{_VISION}; save its language model alone, as 'gemma3_text'",
    "gemma3n": _VISION,
    "llama4": f"{_VISION} and its chunked attention",
    "mllama": _VISION,
    "qwen2_vl": _VISION,
    "qwen2_5_vl": _VISION,
    "qwen3_vl": _VISION,
    "granitemoe": "its experts' fused files",
    "phimoe": "its router",
    "mistral3": f"{_VISION}; save its language model alone, as 'ministral3' or 'mistral'",
    "mistral4": "its router",
    "deepseek_v32": "its sparse attention",
    "glm_moe_dsa": "its sparse attention",
}


def to_llama_config(raw: dict, what: str = "config.json") -> LlamaConfig:
    """Translate the fields of a ``config.json``.

    Args:
        what: begins error messages.

    Raises:
        HydrajaxError: names the field that is missing, invalid or not implemented.
    """
    kind = raw.get("model_type")
    try:
        if not isinstance(kind, str) or kind not in FAMILIES:
            supported = "; ".join(f"'{name}' ({family.models})" for name, family in FAMILIES.items())
            lacks = NOT_IMPLEMENTED.get(kind) if isinstance(kind, str) else None
            more = f"; '{kind}' is not supported because of {lacks}" if lacks else ""
            raise unsupported("model_type", kind, supported + more + plugins.outdated())
        family = FAMILIES[kind]
        raw = family.prepare(family.defaults | raw)
        _check_supported(raw, family)
        return family.read(raw, _shared(raw, family.partial_rotary))
    except KeyError as missing:
        raise HydrajaxError(f"{what}: field {missing} is missing") from None
    except HydrajaxError as error:
        raise HydrajaxError(f"{what}: {error}") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise HydrajaxError(f"{what}: a field has the wrong type: {error}") from None


def text_part(raw: dict, what: str = "config.json") -> dict:
    """Return the fields of a multimodal model's text part, and those of the whole model; other fields unchanged.

    Args:
        what: begins error messages.
    """
    kind, text = raw.get("model_type"), raw.get("text_config")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return raw
    if not isinstance(text, dict):
        raise HydrajaxError(f"{what}: {unsupported('text_config', text, 'an object')}")
    tied = {name: raw[name] for name in ("tie_word_embeddings",) if name in raw}  # the whole model's decides
    return raw | text | tied | {"model_type": TEXT_PARTS[kind]}


def from_llama_config(c: LlamaConfig, what: str) -> dict:
    """Return the fields of ``config.json``, as transformers 4 and 5 both read them.

    They are those of the first family whose fields mean this configuration.

    Raises:
        HydrajaxError: begins with ``what``; no family has these settings.
    """
    for name, family in FAMILIES.items():
        fields = {"architectures": [family.architecture], "model_type": name} | _shared_fields(c)
        try:
            fields |= family.write(c)
            if "rope_parameters" in fields and fields.get("rope_scaling") is None:
                fields.pop("rope_scaling", None)  # transformers 5 would warn
            if to_llama_config(fields) == c:
                return fields
        except (HydrajaxError, ArithmeticError):
            continue
    plain = c.plain_layer.replace(n_layers=c.n_layers, rope_theta=c.rope_theta, rope_scaling=c.rope_scaling)
    extras = [name for name, value in vars(c).items() if value != getattr(plain, name)]
    listed = " and ".join(extras) if len(extras) < 3 else ", ".join(extras[:-1]) + f" and {extras[-1]}"
    raise HydrajaxError(f"{what}: no family has {'both ' if len(extras) == 2 else ''}{listed}")


def _shared_fields(c: LlamaConfig) -> dict[str, Any]:
    """Return the fields that all families share."""
    scaling, context = c.rope_scaling, c.max_positions
    if scaling is not None and scaling.kind == "longrope":
        context = round(scaling.factor * scaling.original_max_position)
    return {
        "hidden_act": hidden_act(c),
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": LlamaConfig.rope_theta if c.rope_theta is None else c.rope_theta,
        "tie_word_embeddings": c.tied_lm_head,
    } | ({"rope_scaling": rope_fields(scaling)} if any(kind.rope_theta for kind in c.layer_kinds or (c,)) else {})


def _shared(raw: dict, partial_rotary: bool) -> LlamaConfig:
    """Return the settings that all families share."""
    n_heads = integer(raw["num_attention_heads"])
    if n_heads < 1:
        raise unsupported("num_attention_heads", n_heads, "1 or more")
    width = integer(raw["hidden_size"])
    rope = raw.get("rope_parameters") or {}
    if FULL in rope or SLIDING in rope:  # by type of layer
        rope = rope.get(FULL) or {}
    # The first LLaMA conversions call it max_sequence_length.
    max_positions = integer(raw.get("max_position_embeddings") or raw.get("max_sequence_length") or 2048)
    scaling = rope_scaling(raw.get("rope_scaling") or rope, raw)
    if scaling is not None and scaling.kind == "longrope":
        # A cache that is filled before this context and read beyond it would mix two rotations.
        max_positions = min(max_positions, scaling.original_max_position)
    head_dim = integer(raw.get("head_dim") or width // n_heads)
    part = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1)) if partial_rotary else 1
    part = 1 if scaling is not None and scaling.kind == "proportional" else part  # its own kind of part
    rotary_dim = int(head_dim * float(part))
    return LlamaConfig(
        vocab_size=integer(raw["vocab_size"]),
        width=width,
        mlp_width=integer(raw["intermediate_size"]),
        n_layers=integer(raw["num_hidden_layers"]),
        n_heads=n_heads,
        n_kv_heads=integer(raw.get("num_key_value_heads") or n_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=scaling,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        tied_lm_head=bool(raw.get("tie_word_embeddings", False)),
        activation=activation(raw),
    )


def _check_supported(raw: dict, family: Family) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name) and not (name == "attention_bias" and family.attention_bias):
            raise unsupported(name, raw[name], "false")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, dict):
            raise unsupported(name, raw[name], "an object")
