"""Qwen 2 and 2.5: LLaMA whose projections to queries, keys and values have biases; some have a sliding window."""

from __future__ import annotations

from typing import Any

from hydrajax.families.family import Family, by_kv_head, integer
from hydrajax.models.llama_config import LlamaConfig


def window(raw: dict) -> Any:
    """Files name a window that does not count unless they also say ``use_sliding_window``."""
    return raw.get("sliding_window") if raw.get("use_sliding_window") else None


def full_layers(raw: dict, n_layers: int) -> int:
    """The window holds from layer ``max_window_layers`` on (transformers' default is 28)."""
    return min(integer(raw.get("max_window_layers", 28)), n_layers)


def window_fields(c: LlamaConfig) -> dict:
    """All layers have the window, or none has."""
    return {
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
        "max_window_layers": 0 if c.sliding_window else c.n_layers,
    }


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen 2, 2.5",
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    qkv_bias=True,
    extra_tensors=lambda path, prefix, c: [by_kv_head((*path, "qkv_bias"), f"{prefix}self_attn.", "bias", c, ())],
    window=window,
    full_layers=full_layers,
    window_fields=window_fields,
)
