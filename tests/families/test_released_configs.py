"""config.json of released models of every family: read as transformers does, and written back unchanged."""

from __future__ import annotations

import json
import math

import pytest
from transformers import AutoConfig

from helpers.configs import FULL, SLIDING, as_transformers_reads, sizes, written
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5}
MISTRAL |= sizes(4096, 14336, 32, 32, 8, 32000) | {"max_position_embeddings": 32768, "tie_word_embeddings": False}
MISTRAL_SIZES = (32000, 4096, 14336, 32, 32, 8, 128)

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
OLMO = {"norms": "after", "qk_norm_all_heads": True}
OLMO3_YARN = RopeScaling("yarn", 8.0, original_max_position=8192, attention_factor=1.2079441541679836)
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "embedding_multiplier": 12.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# 48 divisors, as many as in the released files; the numbers are not theirs.
LONG = {"short_factor": [1.0 + i / 100 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
LONGROPE = RopeScaling(
    "longrope",
    32.0,
    original_max_position=4096,
    attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
    short_factors=tuple(LONG["short_factor"]),
    long_factors=tuple(LONG["long_factor"]),
)


def gemma(c: LlamaConfig) -> LlamaConfig:
    """Return a Gemma of these shapes."""
    return c.replace(
        tied_lm_head=True, norms="both", norm_offset=True, activation="gelu_tanh", embedding_scale=c.width**0.5
    )


def gemma2(c: LlamaConfig) -> LlamaConfig:
    """Return a Gemma 2 of these shapes: every other layer has a window, from the first one on."""
    kinds = tuple(LayerKind(None if i % 2 else 4096) for i in range(c.n_layers))
    return gemma(c).replace(max_positions=8192, layer_kinds=kinds, attention_softcap=50.0, logits_softcap=30.0)


def gemma3(c: LlamaConfig, window: int) -> LlamaConfig:
    """Return a Gemma 3 of these shapes: every sixth layer has no window, and another theta."""
    full, local = LayerKind(None, 1e6, c.rope_scaling), LayerKind(window, 1e4)
    kinds = tuple(full if i % 6 == 5 else local for i in range(c.n_layers))
    return gemma(c).replace(rope_theta=1e6, qk_norm=True, layer_kinds=kinds)


RELEASED = {
    "Mistral-7B-v0.1": (
        MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096},
        LlamaConfig(*MISTRAL_SIZES, 32768, 1e-5, 1e4, sliding_window=4096),
    ),
    "Mistral-7B-Instruct-v0.2": (
        MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None},
        LlamaConfig(*MISTRAL_SIZES, 32768, 1e-5, 1e6),
    ),
    "Qwen2-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            **sizes(3584, 18944, 28, 28, 4, 152064),
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        LlamaConfig(152064, 3584, 18944, 28, 28, 4, 128, 131072, 1e-6, 1e6, qkv_bias=True),
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            **sizes(896, 4864, 24, 14, 2, 151936),
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "use_sliding_window": False,
        },
        LlamaConfig(151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, tied_lm_head=True, qkv_bias=True),
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **sizes(1024, 3072, 28, 16, 8, 151936),
            "attention_bias": False,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        LlamaConfig(151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6, tied_lm_head=True, qk_norm=True),
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes(2048, 8192, 16, 32, 8, 128256),
            "attention_bias": False,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        LlamaConfig(
            *(128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5),
            RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
            tied_lm_head=True,
        ),
    ),
    "TinyLlama-1.1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes(2048, 5632, 22, 32, 4, 32000),
            "attention_bias": False,
            "max_position_embeddings": 2048,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        LlamaConfig(32000, 2048, 5632, 22, 32, 4, 64, 2048, 1e-5),
    ),
    "CodeLlama-7b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes(4096, 11008, 32, 32, 32, 32016),
            "max_position_embeddings": 16384,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
        },
        LlamaConfig(32016, 4096, 11008, 32, 32, 32, 128, 16384, 1e-5, 1e6),
    ),
    "vicuna-7b-v1.3": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes(4096, 11008, 32, 32, None, 32000),
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-06,
            "tie_word_embeddings": False,
        },
        LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, 2048, 1e-6),
    ),
    "LLaMA-1 as first converted": (
        {
            "architectures": ["LLaMAForCausalLM"],
            "model_type": "llama",
            **sizes(4096, 11008, 32, 32, None, 32000),
            "max_sequence_length": 2048,
            "rms_norm_eps": 1e-06,
            "pad_token_id": -1,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, 2048, 1e-6),
    ),
    "Qwen3-8B with YaRN": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **sizes(4096, 12288, 36, 32, 8, 151936),
            "attention_bias": False,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "max_window_layers": 36,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        LlamaConfig(
            *(151936, 4096, 12288, 36, 32, 8, 128, 131072, 1e-6, 1e6),
            RopeScaling("yarn", 4.0, original_max_position=32768, attention_factor=0.1 * math.log(4) + 1),
            qk_norm=True,
        ),
    ),
    "gemma-3-270m": (
        GEMMA3
        | sizes(640, 2048, 18, 4, 1, 262144)
        | {
            "_sliding_window_pattern": 6,
            "layer_types": [FULL if i % 6 == 5 else SLIDING for i in range(18)],
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "use_bidirectional_attention": False,
        },
        gemma3(LlamaConfig(262144, 640, 2048, 18, 4, 1, 256, 32768), 512),
    ),
    "gemma-3-1b-it": (
        GEMMA3
        | sizes(1152, 6912, 26, 4, 1, 262144)
        | {"max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6},
        gemma3(LlamaConfig(262144, 1152, 6912, 26, 4, 1, 256, 32768), 512),
    ),
    "gemma-3-4b-it, its language model": (
        GEMMA3
        | sizes(2560, 10240, 34, 8, 4, 262208)
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        gemma3(LlamaConfig(262208, 2560, 10240, 34, 8, 4, 256, 131072, rope_scaling=RopeScaling("linear", 8.0)), 1024),
    ),
    "gemma-2-2b": (
        GEMMA2 | sizes(2304, 9216, 26, 8, 4, 256000),
        gemma2(LlamaConfig(256000, 2304, 9216, 26, 8, 4, 256)),
    ),
    "gemma-2-9b": (
        GEMMA2 | sizes(3584, 14336, 42, 16, 8, 256000),
        gemma2(LlamaConfig(256000, 3584, 14336, 42, 16, 8, 256)),
    ),
    "gemma-2-27b": (
        GEMMA2 | sizes(4608, 36864, 46, 32, 16, 256000) | {"head_dim": 128, "query_pre_attn_scalar": 144},
        gemma2(LlamaConfig(256000, 4608, 36864, 46, 32, 16, 128, attention_scale=144**-0.5)),
    ),
    "OLMo-2-0425-1B": (
        OLMO2 | sizes(2048, 8192, 16, 16, 16, 100352),
        LlamaConfig(100352, 2048, 8192, 16, 16, 16, 128, 4096, 1e-6, 5e5, **OLMO),
    ),
    "OLMo-2-1124-7B": (
        OLMO2 | sizes(4096, 11008, 32, 32, 32, 100352),
        LlamaConfig(100352, 4096, 11008, 32, 32, 32, 128, 4096, 1e-6, 5e5, **OLMO),
    ),
    "Olmo-3-1025-7B": (
        OLMO2
        | sizes(4096, 11008, 32, 32, 32, 100278)
        | {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "layer_types": [FULL if i % 4 == 3 else SLIDING for i in range(32)],
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "sliding_window": 4096,
        },
        LlamaConfig(
            *(100278, 4096, 11008, 32, 32, 32, 128, 65536, 1e-6, 5e5),
            OLMO3_YARN,
            layer_kinds=(*(LayerKind(4096, 5e5),) * 3, LayerKind(None, 5e5, OLMO3_YARN)) * 8,
            **OLMO,
        ),
    ),
    "granite-3.3-2b-instruct": (
        GRANITE | sizes(2048, 8192, 40, 32, 8, 49159) | {"attention_multiplier": 0.015625, "logits_scaling": 8.0},
        LlamaConfig(
            *(49159, 2048, 8192, 40, 32, 8, 64, 131072, 1e-5, 1e7),
            tied_lm_head=True,
            embedding_scale=12.0,
            residual_scale=0.22,
            attention_scale=1 / 64,
            logits_divisor=8.0,
        ),
    ),
    "granite-3.3-8b-instruct": (
        GRANITE | sizes(4096, 12800, 40, 32, 8, 49159) | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0},
        LlamaConfig(
            *(49159, 4096, 12800, 40, 32, 8, 128, 131072, 1e-5, 1e7),
            tied_lm_head=True,
            embedding_scale=12.0,
            residual_scale=0.22,
            attention_scale=1 / 128,
            logits_divisor=16.0,
        ),
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            **sizes(2048, 11008, 36, 16, 4, 128256),
            "attention_bias": False,
            "layer_types": [FULL] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        LlamaConfig(
            *(128256, 2048, 11008, 36, 16, 4, 128, 65536, 1e-6, 5e6),
            tied_lm_head=True,
            layer_kinds=(*(LayerKind(None, 5e6),) * 3, LayerKind(None, None)) * 9,
        ),
    ),
    "Phi-3-mini-4k-instruct": (
        PHI3
        | sizes(3072, 8192, 32, 32, 32, 32064)
        | {"max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
        LlamaConfig(32064, 3072, 8192, 32, 32, 32, 96, 4096, 1e-5, sliding_window=2047, fused_projections=True),
    ),
    "Phi-3-mini-128k-instruct": (
        PHI3
        | sizes(3072, 8192, 32, 32, 32, 32064)
        | {"max_position_embeddings": 131072, "rope_scaling": LONG | {"type": "longrope"}, "sliding_window": 262144},
        LlamaConfig(*(32064, 3072, 8192, 32, 32, 32, 96, 4096, 1e-5), rope_scaling=LONGROPE, fused_projections=True),
    ),
    "phi-4": (
        PHI3
        | sizes(5120, 17920, 40, 40, 10, 100352)
        | {
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
        },
        LlamaConfig(100352, 5120, 17920, 40, 40, 10, 128, 16384, 1e-5, 250000.0, fused_projections=True),
    ),
    "Phi-4-mini-instruct": (
        PHI3
        | sizes(3072, 8192, 32, 24, 8, 200064)
        | {
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONG | {"type": "longrope"},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        LlamaConfig(
            *(200064, 3072, 8192, 32, 24, 8, 128, 4096, 1e-5),
            rope_scaling=LONGROPE,
            rotary_dim=96,
            tied_lm_head=True,
            fused_projections=True,
        ),
    ),
}


@pytest.mark.parametrize("name", list(RELEASED))
def test_released_files_are_read_as_by_transformers(name, tmp_path):
    raw, expected = RELEASED[name]
    folder = written(tmp_path / "released", raw)
    assert to_llama_config(raw) == expected
    assert as_transformers_reads(folder) == expected
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert to_llama_config(saved) == expected  # what transformers 5 makes of the file


@pytest.mark.parametrize("name", list(RELEASED))
def test_released_files_survive_our_writing(name, tmp_path):
    _, config = RELEASED[name]
    raw = from_llama_config(config, "base")
    assert to_llama_config(raw) == config
    assert as_transformers_reads(written(tmp_path, raw)) == config
