"""Qwen 3: LLaMA with an RMSNorm over each head's queries and keys; windows are said as in Qwen 2."""

from __future__ import annotations

from hydrajax.families import qwen2
from hydrajax.families.family import Family
from hydrajax.models.layout import Layout, Path, same
from hydrajax.models.llama_config import LlamaConfig


def norms(path: Path, prefix: str, c: LlamaConfig) -> Layout:
    return [
        same((*path, f"{ours}_norm", "scale"), f"{prefix}self_attn.{theirs}_norm.weight", c.head_dim)
        for ours, theirs in (("query", "q"), ("key", "k"))
    ]


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen 3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
    qk_norm=True,
    extra_tensors=norms,
    window=qwen2.window,
    full_layers=qwen2.full_layers,
    window_fields=qwen2.window_fields,
)
