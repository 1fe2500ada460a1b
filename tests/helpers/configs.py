"""config.json files and their meaning in transformers, the independent source of defaults."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig

from hydrajax.models.llama_config import LlamaConfig, RopeScaling


def written(folder: Path, raw: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def as_transformers_reads(folder: Path) -> LlamaConfig:
    """Return the meaning of a config.json in transformers, from its attributes and the behaviour of its models.

    A window of at least the context counts as no window.
    """
    hf = AutoConfig.from_pretrained(folder)
    rope = dict(hf.rope_parameters)
    scaling = None
    if rope["rope_type"] == "linear":
        scaling = RopeScaling("linear", float(rope["factor"]))
    elif rope["rope_type"] == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = RopeScaling("llama3", *(float(rope[name]) for name in names[:3]), rope[names[3]])
    window = getattr(hf, "sliding_window", None)
    if hf.model_type.startswith("qwen"):
        kinds = set(hf.layer_types)
        assert len(kinds) == 1
        window = window if kinds == {"sliding_attention"} else None
    return LlamaConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        mlp_width=hf.intermediate_size,
        n_layers=hf.num_hidden_layers,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        max_positions=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        tied_lm_head=hf.tie_word_embeddings,
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type == "qwen3",
        sliding_window=window if window is not None and window < hf.max_position_embeddings else None,
    )


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, vocab: int) -> dict:
    fields = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
    }
    return {name: value for name, value in fields.items() if value is not None}
