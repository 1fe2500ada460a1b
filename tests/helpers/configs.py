"""config.json files as transformers completes them: the independent source of defaults."""

import json
from pathlib import Path

from transformers import AutoConfig, DeepseekV3Config, Qwen2Config

from hydrajax.families.family_registry import to_llama_config
from hydrajax.models.llama_config import LlamaConfig

FULL, SLIDING = "full_attention", "sliding_attention"
QWEN_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LFM = ("lfm2", "lfm2_moe", "lfm3")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")


class MiMoConfig(Qwen2Config):
    """MiMo's class is in its repositories: Qwen 2's with another name."""

    model_type = "mimo"


class KimiK2Config(DeepseekV3Config):
    """Kimi K2's class is in its repositories: DeepSeek V3's with another name."""

    model_type = "kimi_k2"


AutoConfig.register("mimo", MiMoConfig)
AutoConfig.register("kimi_k2", KimiK2Config)


def written(folder: Path, raw: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def as_transformers_reads(folder: Path) -> LlamaConfig:
    """Return what we read if all that a config.json leaves out is written into it, as transformers completes it."""
    return to_llama_config(AutoConfig.from_pretrained(folder).to_dict())


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, vocab: int) -> dict:
    fields = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "hidden_act": "silu",
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}
