"""The supported model families, and translation between their ``config.json`` and `LlamaConfig`.

A family that differs from LLaMA only in these fields is one entry of `FAMILIES`. The fields are parsed here rather than
by transformers' configuration classes, which the tests compare with: those list every layer, so that a slip in a number
takes all memory, and accept fields that we do not implement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig, RopeScaling


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        architecture: its class in transformers.
        models: well-known models of the family, for messages.
        defaults: transformers' defaults for missing fields, where they differ from LLaMA's.
        qkv_bias: the query, key and value projections have biases.
        qk_norm: each head's queries and keys are normed.
        window: layers with ``sliding_window``: ``""`` none; ``"all"``; ``"switched"`` if ``use_sliding_window``, those
            from ``max_window_layers`` on.
    """

    architecture: str
    models: str
    defaults: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = ""


_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
# By model_type. A configuration is written as the first family that fits.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LLaMA 1, 2, 3, 3.1, 3.2, Vicuna, TinyLlama, CodeLlama"),
    "mistral": Family("MistralForCausalLM", "Mistral", _MISTRAL, window="all"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen 2, 2.5", _QWEN, qkv_bias=True, window="switched"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen 3", _QWEN | {"head_dim": 128}, qk_norm=True, window="switched"),
}
SUPPORTED = "; ".join(f"'{name}' ({family.models})" for name, family in FAMILIES.items())


def unsupported(name: str, found: Any, expected: str) -> HydrajaxError:
    """Return the error for a field whose value is not implemented; the caller adds the file."""
    found = repr(found)
    return HydrajaxError(f"{name}: got {found if len(found) <= 200 else found[:200] + '...'}, expected {expected}")


def to_llama_config(raw: dict, what: str = "config.json") -> LlamaConfig:
    """Translate the fields of a ``config.json``.

    Args:
        raw: the parsed file.
        what: begins error messages.

    Raises:
        HydrajaxError: names the field that is missing, invalid or not implemented.
    """
    kind = raw.get("model_type")
    try:
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise unsupported("model_type", kind, SUPPORTED)
        family = FAMILIES[kind]
        raw = family.defaults | raw
        _check_supported(raw)
        return _translate(raw, family)
    except KeyError as missing:
        raise HydrajaxError(f"{what}: field {missing} is missing") from None
    except HydrajaxError as error:
        raise HydrajaxError(f"{what}: {error}") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise HydrajaxError(f"{what}: a field has the wrong type: {error}") from None


def from_llama_config(c: LlamaConfig, what: str) -> dict:
    """Return the fields of ``config.json``, as transformers 4 and 5 both read them.

    Raises:
        HydrajaxError: begins with ``what``; no family has these settings.
    """
    extras = (c.qkv_bias, c.qk_norm)
    fitting = (
        (name, family)
        for name, family in FAMILIES.items()
        if (family.qkv_bias, family.qk_norm) == extras and (family.window or c.sliding_window is None)
    )
    name, family = next(fitting, (None, None))
    if family is None:
        raise HydrajaxError(f"{what}: no family has both qkv_bias and qk_norm")
    config = {
        "architectures": [family.architecture],
        "model_type": name,
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
    if (rope := c.rope_scaling) is not None:
        scaling = config["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            scaling["low_freq_factor"] = rope.low_freq_factor
            scaling["high_freq_factor"] = rope.high_freq_factor
            scaling["original_max_position_embeddings"] = rope.original_max_position
    if family.window == "all":
        config["sliding_window"] = c.sliding_window
    elif family.window == "switched":
        config["use_sliding_window"] = c.sliding_window is not None
        config["sliding_window"] = c.sliding_window
        config["max_window_layers"] = 0 if c.sliding_window else c.n_layers
    return config


def _translate(raw: dict, family: Family) -> LlamaConfig:
    n_heads = _integer(raw["num_attention_heads"])
    if n_heads < 1:
        raise unsupported("num_attention_heads", n_heads, "1 or more")
    width, n_layers = _integer(raw["hidden_size"]), _integer(raw["num_hidden_layers"])
    rope = raw.get("rope_parameters") or {}
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
        rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, raw),
        tied_lm_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(raw, family, n_layers, max_positions),
    )


def _sliding_window(raw: dict, family: Family, n_layers: int, max_positions: int) -> int | None:
    """The window of every layer; None if there is none, or none shorter than the context."""
    window = raw.get("sliding_window")
    enabled = family.window == "all" or (family.window == "switched" and raw.get("use_sliding_window"))
    if not enabled or window is None or (window := _integer(window)) >= max_positions:
        return None
    types = raw.get("layer_types")  # in newer files, where it overrides the other fields
    if types is not None:
        n_full, n_sliding = (list(types).count(f"{name}_attention") for name in ("full", "sliding"))
    else:  # transformers' default of max_window_layers is 28
        n_full = 0 if family.window == "all" else min(_integer(raw.get("max_window_layers", 28)), n_layers)
        n_sliding = n_layers - n_full
    if n_full == n_layers:
        return None
    if n_sliding != n_layers:
        raise HydrajaxError(
            f"layer_types: got {n_full} full and {n_sliding} sliding of {n_layers} layers, expected one kind for all "
            "layers"
        )
    return window


def _check_supported(raw: dict) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise unsupported("hidden_act", raw["hidden_act"], "'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise unsupported(name, raw[name], "false")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, dict):
            raise unsupported(name, raw[name], "an object")


def _rope_scaling(scaling: dict, raw: dict) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(scaling["factor"]))
    if kind != "llama3":
        raise unsupported("rope scaling", kind, "'linear' or 'llama3'")
    return RopeScaling(
        "llama3",
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        _integer(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )


def _integer(value: Any) -> int:
    """A number of ``config.json``; a larger one would overflow or take all memory."""
    found = int(value)
    if abs(found) >= 2**31:
        raise ValueError("an integer beyond 32 bits")
    return found
