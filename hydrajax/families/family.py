"""The model families that load, and their ``config.json`` to and from `LlamaConfig`.

One row of `FAMILIES` is a family: which parts its layers have beyond LLaMA's, and what transformers takes for a field
that a file leaves out. Names of tensors are the same in all (`hydrajax.models.layout`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.models.config import LlamaConfig, RopeScaling


@dataclass(frozen=True)
class Family:
    """architecture: transformers' class. defaults: of config.json's fields, where transformers' are not LLaMA's."""

    architecture: str
    models: str
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LLaMA 1, 2, 3, 3.1, 3.2, Vicuna, TinyLlama, CodeLlama"),
    "mistral": Family(
        "MistralForCausalLM",
        "Mistral",
        sliding_window=True,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen 2, 2.5",
        qkv_bias=True,
        sliding_window=True,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen 3",
        qk_norm=True,
        sliding_window=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
    ),
}
SUPPORTED = "; ".join(f"'{name}' ({family.models})" for name, family in FAMILIES.items())


def to_llama_config(raw: dict, what: str = "config.json") -> LlamaConfig:
    """Translate ``config.json`` (``what`` in messages); refuse by name what the model does not implement."""

    def refuse(name, found, allowed):
        raise HydrajaxError(f"{what}: {name} is {found!r}, supported is {allowed}")

    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        refuse("model_type", kind, SUPPORTED)
    family = FAMILIES[kind]
    raw = family.defaults | raw
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", raw["hidden_act"], "'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            refuse(name, raw[name], "false")
    for name in ("quantization_config", "rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, dict):
            refuse(name, raw[name], "an object")
    if raw.get("quantization_config"):
        refuse("quantization_config", raw["quantization_config"].get("quant_method"), "none (float weights)")
    try:
        n_heads = _integer(raw["num_attention_heads"])
        if n_heads < 1:
            refuse("num_attention_heads", n_heads, "1 or more")
        width = _integer(raw["hidden_size"])
        rope = raw.get("rope_parameters") or {}
        n_layers = _integer(raw["num_hidden_layers"])
        # The first LLaMA conversions call it max_sequence_length.
        max_positions = _integer(raw.get("max_position_embeddings") or raw.get("max_sequence_length") or 2048)
        return LlamaConfig(
            vocab_size=_integer(raw["vocab_size"]),
            width=width,
            mlp_width=_integer(raw["intermediate_size"]),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=_integer(raw.get("num_key_value_heads") or n_heads),
            head_dim=_integer(raw.get("head_dim") or width // n_heads),
            max_positions=max_positions,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, raw, what),
            tied_lm_head=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=_window(kind, raw, n_layers, max_positions, what) if family.sliding_window else None,
        )
    except KeyError as missing:
        raise HydrajaxError(f"{what}: field {missing} is missing") from None
    except HydrajaxError as error:  # `LlamaConfig` does not know whose numbers they are
        line = str(error)
        raise HydrajaxError(line if line.startswith(what) else f"{what}: {line}") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise HydrajaxError(f"{what}: a field has the wrong type: {error}") from None


def _integer(value: Any) -> int:
    found = int(value)
    if abs(found) >= 2**31:
        raise ValueError("an integer beyond 32 bits")
    return found


def _rope_scaling(scaling: dict, raw: dict, what: str) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise HydrajaxError(f"{what}: rope scaling type is '{kind}', supported are 'linear' and 'llama3'")
    if kind == "linear":
        return RopeScaling("linear", float(scaling["factor"]))
    return RopeScaling(
        "llama3",
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        _integer(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )


def _window(kind: str, raw: dict, n_layers: int, max_positions: int, what: str) -> int | None:
    """The window, if every layer has it; None if none has, or none that is shorter than the context.

    Mistral's layers all do; Qwen's only with ``use_sliding_window``, from layer ``max_window_layers`` on. Newer files
    list ``layer_types``.
    """
    if raw.get("sliding_window") is None or (kind != "mistral" and not raw.get("use_sliding_window")):
        return None
    window = _integer(raw["sliding_window"])
    if window >= max_positions:
        return None
    types = raw.get("layer_types")
    if types is None:
        n_full = 0 if kind == "mistral" else min(_integer(raw.get("max_window_layers", 28)), n_layers)
        n_sliding = n_layers - n_full
    else:
        n_full, n_sliding = (list(types).count(f"{name}_attention") for name in ("full", "sliding"))
    if n_full == n_layers:
        return None
    if n_sliding != n_layers:
        raise HydrajaxError(
            f"{what}: layer_types mixes layers with and without a sliding window (or lists others), "
            "supported is one kind for all layers"
        )
    return window


def from_llama_config(c: LlamaConfig, what: str) -> dict:
    """Fields of config.json that transformers 4 and 5 both read."""
    if c.qkv_bias and c.qk_norm:
        raise HydrajaxError(f"{what}: no family has both qkv_bias and qk_norm")
    kind = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.sliding_window else "llama"
    config = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": c.tied_lm_head,
    }
    if kind == "mistral":
        config["sliding_window"] = c.sliding_window
    if kind.startswith("qwen"):
        config |= {"use_sliding_window": c.sliding_window is not None, "sliding_window": c.sliding_window}
        config["max_window_layers"] = 0 if c.sliding_window else c.n_layers
    if c.rope_scaling is not None:
        scaling = config["rope_scaling"] = {"rope_type": c.rope_scaling.kind, "factor": c.rope_scaling.factor}
        if c.rope_scaling.kind == "llama3":
            scaling["low_freq_factor"] = c.rope_scaling.low_freq_factor
            scaling["high_freq_factor"] = c.rope_scaling.high_freq_factor
            scaling["original_max_position_embeddings"] = c.rope_scaling.original_max_position
    return config
