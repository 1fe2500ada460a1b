"""LLaMA, Mistral and Qwen: the fields of their ``config.json`` that other families do not have."""

from __future__ import annotations

from typing import Any

from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    integer,
    layer_types,
    types_of,
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
LLAMA = Family("LlamaForCausalLM", "LLaMA 1, 2, 3, 3.1, 3.2, Vicuna, TinyLlama, CodeLlama")
MISTRAL = Family("MistralForCausalLM", "Mistral", _MISTRAL, _mistral, _mistral_fields)
QWEN2 = Family("Qwen2ForCausalLM", "Qwen 2, 2.5", _QWEN, _qwen2, _switched_fields)
# Its MTP module is a draft (`hydrajax.formats.mtp_format`). Biases are Qwen 2's, whatever attention_bias says.
MIMO = Family(
    "MiMoForCausalLM", "MiMo 7B", _QWEN, _qwen2, _switched_fields, lambda raw: raw | {"attention_bias": False}
)
QWEN3 = Family("Qwen3ForCausalLM", "Qwen 3", _QWEN | {"head_dim": 128}, _qwen3, _switched_fields)
