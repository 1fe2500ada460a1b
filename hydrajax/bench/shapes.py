"""Shapes by name, for benchmarks, predictions and compilations."""

from typing import Any

from hydrajax.families.family_registry import to_llama_config
from hydrajax.models.expert_settings import Experts
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import GatedDelta, Recurrent


def _hybrid(c: LlamaConfig, recurrent: Recurrent) -> LlamaConfig:
    """Return the shape of a Qwen hybrid: three recurrent layers for each one of attention."""
    state, attention = LayerKind(None, None, recurrent=recurrent), LayerKind(None, c.rope_theta)
    c = c.replace(qk_norm=True, norm_offset=True, attention_gate=True, rotary_dim=c.head_dim // 4)
    return c.replace(layer_kinds=(state, state, state, attention) * (c.n_layers // 4))


# Published shapes, for benchmarks on random weights (`hydrajax bench --random NAME`). "25m" is the size used to compare
# with transformers on a CPU; "tiny" is for trying a command out.
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(512, 64, 172, 3, 4, 4, 16, max_positions=1024),
    "25m": LlamaConfig(4096, 512, 1536, 6, 8, 8, 64, max_positions=2048),
    "1b": LlamaConfig(32_000, 2048, 5632, 22, 32, 4, 64, max_positions=2048, norm_eps=1e-5),  # TinyLlama 1.1B
    "7b": LlamaConfig(32_000, 4096, 11_008, 32, 32, 32, 128, max_positions=8192),  # LLaMA 7B, Vicuna 7B
    "13b": LlamaConfig(32_000, 5120, 13_824, 40, 40, 40, 128, max_positions=8192),
    "33b": LlamaConfig(32_000, 6656, 17_920, 60, 52, 52, 128, max_positions=8192),
    "8b": LlamaConfig(128_256, 4096, 14_336, 32, 32, 8, 128, 8192, 1e-5, 500_000.0),  # LLaMA 3 8B
    "70b": LlamaConfig(32_000, 8192, 28_672, 80, 64, 8, 128, max_positions=8192, norm_eps=1e-5),  # LLaMA 2 70B
    "llama3-70b": LlamaConfig(128_256, 8192, 28_672, 80, 64, 8, 128, 8192, 1e-5, 500_000.0),  # LLaMA 3 70B
    "hybrid-100m": _hybrid(
        LlamaConfig(16_384, 768, 2048, 12, 6, 2, 128, max_positions=2048, tied_lm_head=True),
        GatedDelta(4, 6, 12, 64, 64),
    ),
}


def _glm() -> LlamaConfig:
    experts = Experts(128, 8, 1408, shared_width=1408, scores="sigmoid", normalized=True, choice_bias=True)
    kinds = (LayerKind(None, 1e6), *(LayerKind(None, 1e6, None, experts),) * 45)
    shape = LlamaConfig(151_552, 4096, 10_944, 46, 96, 8, 128, 131_072, 1e-5, 1e6, qkv_bias=True, rotary_dim=64)
    return shape.replace(layer_kinds=kinds)


_GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880}
_GPT_OSS |= {"num_attention_heads": 64}
_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
_DEEPSEEK = {"model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432}
_DEEPSEEK |= {"num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 163_840}
_DEEPSEEK |= {"rope_scaling": _YARN}
# transformers' defaults, which are those of zai-org/GLM-4.7-Flash.
_GLM_FLASH = {"model_type": "glm4_moe_lite", "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240}
_GLM_FLASH |= {"num_hidden_layers": 47, "num_attention_heads": 20}
# The settings of their published config.json.
MIXTURES = {
    "mixtral-8x7b": LlamaConfig(
        *(32_000, 4096, 14_336, 32, 32, 8, 128, 32_768, 1e-5, 1e6),
        experts=Experts(8, 2, 14_336, normalized=True, block="block_sparse_moe"),
    ),
    "qwen3-30b-a3b": LlamaConfig(
        *(151_936, 2048, 6144, 48, 32, 4, 128, 40_960, 1e-6, 1e6),
        qk_norm=True,
        experts=Experts(128, 8, 768, normalized=True),
    ),
    "olmoe-1b-7b": LlamaConfig(
        50_304, 2048, 1024, 16, 16, 16, 128, 4096, 1e-5, qk_norm_all_heads=True, experts=Experts(64, 8, 1024)
    ),
    "glm-4.5-air": _glm(),
    "gpt-oss-20b": to_llama_config(_GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": to_llama_config(_GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "deepseek-v3": to_llama_config(_DEEPSEEK),
    "glm-4.7-flash": to_llama_config(_GLM_FLASH),
}
HYBRIDS = {
    "qwen3.5-9b": _hybrid(
        LlamaConfig(248_320, 4096, 12_288, 32, 16, 4, 256, 262_144, 1e-6, 1e7),
        GatedDelta(4, 16, 32, 128, 128, names="qwen3_5"),
    )
}
# transformers' defaults, which are those of meta-models/Muse-Glimmer-30B.
_MUSE = {"vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52}
DENSE = {"muse-glimmer-30b": to_llama_config({"model_type": "muse_glimmer_text", "num_attention_heads": 32} | _MUSE)}


def _gemma4(width: int, mlp_width: int, n_layers: int, n_heads: int, n_kv_heads: int, **more: Any) -> LlamaConfig:
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    fields = dict(zip(names, (width, mlp_width, n_layers, n_heads, n_kv_heads), strict=True))
    always = {"model_type": "gemma4_text", "vocab_size": 262_144, "final_logit_softcapping": 30.0}
    return to_llama_config(always | fields | more)


_WIDE = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "attention_k_eq_v": True}
_EVERY_FIFTH = ["full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(35)]
GEMMA4 = {  # the text parts
    "gemma4-e2b": _gemma4(
        1536, 6144, 35, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=_EVERY_FIFTH
    ),
    "gemma4-e4b": _gemma4(2560, 10_240, 42, 8, 2, num_kv_shared_layers=18),
    "gemma4-26b-a4b": _gemma4(
        *(2816, 2112, 30, 16, 8),
        **_WIDE | {"num_global_key_value_heads": 2, "enable_moe_block": True},
        **{"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "gemma4-31b": _gemma4(5376, 21_504, 60, 32, 16, **_WIDE | {"num_global_key_value_heads": 4}),
}
SHAPES: dict[str, LlamaConfig] = PRESETS | MIXTURES | HYBRIDS | DENSE | GEMMA4
