"""Mistral: LLaMA with a sliding window, the same in every layer."""

from __future__ import annotations

from hydrajax.families.family import Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    window=lambda raw: raw.get("sliding_window"),
    window_fields=lambda c: {"sliding_window": c.sliding_window},
)
