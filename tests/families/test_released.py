"""config.json of released models: read as transformers does, written back unchanged, and as large as published."""

import json
import math
import re

import pytest
from transformers import AutoConfig

from helpers.configs import FULL, SLIDING, as_transformers_reads, sizes, written
from hydrajax.bench.shapes import DENSE, MIXTURES
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.models.layout import shapes

GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "max_position_embeddings": 131072,
    "initial_context_length": 4096, "experts_per_token": 4, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
    "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
EXPERT = r"\.experts\.|block_sparse_moe\.(input|output)_linear"  # in names of tensors
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
MISTRAL = {"model_type": "mistral", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768} | UNTIED
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}
QWEN3 = QWEN | {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
GEMMA = {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
GEMMA2 = GEMMA | {
    "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192, "rope_theta": 1e4, "sliding_window": 4096,
}  # fmt: skip
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
}  # fmt: skip
OLMO = {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 500000} | UNTIED
PHI3 = {"model_type": "phi3", "attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 1e4} | UNTIED
# 48 divisors, as many as in the released files; the numbers are not theirs.
LONGROPE = {
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0 + i / 100 for i in range(48)],
        "long_factor": [1.0 + i for i in range(48)],
    },
    "sliding_window": 262144,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLMO3_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "max_position_embeddings": 40960, "mlp_only_layers": [],
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "max_position_embeddings": 131072,
    "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "topk_group": 1,
} | UNTIED  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1, "kv_lora_rank": 512, "moe_layer_freq": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1, "rope_theta": 10000, "n_shared_experts": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "q_lora_rank": 1536, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "max_position_embeddings": 163840, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
} | UNTIED  # fmt: skip
LFM2 = {
    "conv_L_cache": 3, "conv_bias": False, "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0,
}  # fmt: skip
LFM2_ATTENDS = [2, 5, 8, 10, 12, 14]
QWEN_DELTA = {
    "attention_bias": False, "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
} | UNTIED  # fmt: skip
QWEN_512 = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
MROPE = {
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    }
}  # fmt: skip
OLMO_HYBRID = {
    "attention_bias": False, "layer_types": [FULL if i % 4 == 3 else "linear_attention" for i in range(32)],
    "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 96, "linear_num_key_heads": 30,
    "linear_num_value_heads": 30, "linear_value_head_dim": 192, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
} | UNTIED  # fmt: skip
GRANITE4 = {
    "model_type": "granitemoehybrid", "attention_bias": False, "embedding_multiplier": 12, "logits_scaling": 10,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000,
} | TIED  # fmt: skip
GRANITE4_H = GRANITE4 | {
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)], "position_embedding_type": "nope",
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    "layer_norm_epsilon": 1e-5, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "n_groups": 8, "num_logits_to_keep": 1, "residual_in_fp32": False,
    "rms_norm_eps": 1e-5, "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False,
    "use_conv_bias": True,
} | UNTIED  # fmt: skip
# The fields, with the parameters of the model and those that one token uses, in billions.
RELEASED = {
    "Mistral-7B-v0.1": (MISTRAL | sizes(4096, 14336, 32, 32, 8, 32000) | {"sliding_window": 4096}, 7.24),
    "Mistral-7B-Instruct-v0.2": (
        MISTRAL | sizes(4096, 14336, 32, 32, 8, 32000) | {"rope_theta": 1e6, "sliding_window": None}, 7.24,
    ),
    "Qwen2.5-0.5B": (
        QWEN | sizes(896, 4864, 24, 14, 2, 151936)
        | {"model_type": "qwen2", "max_position_embeddings": 32768, "max_window_layers": 24, "sliding_window": 32768}
        | TIED, 0.494,
    ),
    "Qwen3-8B with YaRN": (
        QWEN3 | sizes(4096, 12288, 36, 32, 8, 151936)
        | {"model_type": "qwen3", "max_position_embeddings": 131072, "max_window_layers": 36, "rope_scaling": YARN}
        | UNTIED, 8.19,
    ),
    "Llama-3.2-1B": (
        LLAMA | sizes(2048, 8192, 16, 32, 8, 128256) | {
            "attention_bias": False, "head_dim": 64, "max_position_embeddings": 131072, "mlp_bias": False,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
        } | TIED, 1.236,
    ),
    "LLaMA-1 as first converted": (
        LLAMA | sizes(4096, 11008, 32, 32, None, 32000)
        | {"max_sequence_length": 2048, "pad_token_id": -1, "bos_token_id": 0, "eos_token_id": 1}, 6.738,
    ),
    "gemma-3-270m": (
        GEMMA3 | sizes(640, 2048, 18, 4, 1, 262144) | {
            "_sliding_window_pattern": 6, "layer_types": [FULL if i % 6 == 5 else SLIDING for i in range(18)],
            "max_position_embeddings": 32768, "sliding_window": 512, "use_bidirectional_attention": False,
        }, 0.268,
    ),
    "gemma-3-4b-it, its language model": (
        GEMMA3 | sizes(2560, 10240, 34, 8, 4, 262208)
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}, 3.88,
    ),
    "gemma-2-27b": (
        GEMMA2 | sizes(4608, 36864, 46, 32, 16, 256000) | {"head_dim": 128, "query_pre_attn_scalar": 144}, 27.227,
    ),
    "OLMo-2-0425-1B": (
        OLMO | sizes(2048, 8192, 16, 16, 16, 100352)
        | {"model_type": "olmo2", "max_position_embeddings": 4096, "rope_scaling": None}, 1.485,
    ),
    "Olmo-3-1025-7B": (
        OLMO | sizes(4096, 11008, 32, 32, 32, 100278) | {
            "model_type": "olmo3", "layer_types": [FULL if i % 4 == 3 else SLIDING for i in range(32)],
            "max_position_embeddings": 65536,
            "rope_scaling": OLMO3_YARN | {"beta_slow": 1.0, "attention_factor": 1.2079441541679836},
            "sliding_window": 4096,
        }, 7.298,
    ),
    "granite-3.3-2b-instruct": (
        sizes(2048, 8192, 40, 32, 8, 49159) | {
            "model_type": "granite", "attention_bias": False, "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0, "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
        } | TIED, 2.534,
    ),
    "SmolLM3-3B": (
        sizes(2048, 11008, 36, 16, 4, 128256) | {
            "model_type": "smollm3", "attention_bias": False, "layer_types": [FULL] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "sliding_window": None,
            "use_sliding_window": False,
        } | TIED, 3.075,
    ),
    "Phi-3-mini-4k-instruct": (
        PHI3 | sizes(3072, 8192, 32, 32, 32, 32064)
        | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": 2047}, 3.821,
    ),
    "Phi-3-mini-128k-instruct": (PHI3 | sizes(3072, 8192, 32, 32, 32, 32064) | LONGROPE, 3.821),
    "Phi-4-mini-instruct": (
        PHI3 | sizes(3072, 8192, 32, 24, 8, 200064) | LONGROPE | {"partial_rotary_factor": 0.75} | TIED, 3.836,
    ),
    "Mixtral-8x7B-v0.1": (
        MISTRAL | sizes(4096, 14336, 32, 32, 8, 32000) | {
            "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "rope_theta": 1e6,
            "sliding_window": None,
        }, 46.70, 12.88,
    ),
    "Qwen3-30B-A3B": (
        QWEN3_MOE | sizes(2048, 6144, 48, 32, 4, 151936) | {"moe_intermediate_size": 768, "max_window_layers": 48}
        | UNTIED, 30.53, 3.35,
    ),
    "gpt-oss-20b": (GPT_OSS | sizes(2880, 2880, 24, 64, 8, 201088) | {"num_local_experts": 32}, 20.915, 4.187),
    "gpt-oss-120b": (GPT_OSS | sizes(2880, 2880, 36, 64, 8, 201088) | {"num_local_experts": 128}, 116.829, 5.712),
    "OLMoE-1B-7B-0924": (
        sizes(2048, 1024, 16, 16, 16, 50304) | {
            "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "max_position_embeddings": 4096,
            "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
        } | UNTIED, 6.92, 1.28,
    ),
    "Qwen1.5-MoE-A2.7B": (
        QWEN | sizes(2048, 5632, 24, 16, 16, 151936) | {
            "model_type": "qwen2_moe", "decoder_sparse_step": 1, "max_position_embeddings": 8192,
            "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60,
            "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        } | UNTIED, 14.32, 2.69,
    ),
    "GLM-4.5-Air": (
        GLM | sizes(4096, 10944, 46, 96, 8, 151552)
        | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "routed_scaling_factor": 1.0}
        | {"first_k_dense_replace": 1, "use_qk_norm": False}, 106.85, 13.42,
    ),
    "DeepSeek-V3": (
        DEEPSEEK | sizes(7168, 18432, 61, 128, 128, 129280) | {
            "first_k_dense_replace": 3, "n_group": 8, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
            "topk_group": 4,
        }, 671.026, 37.55,
    ),
    "GLM-4.7-Flash, transformers' defaults": (
        sizes(2048, 10240, 47, 20, 20, 154880) | {"model_type": "glm4_moe_lite"} | UNTIED, 29.943, 3.9,
    ),
    "DeepSeek-V2-Lite": (
        DEEPSEEK | sizes(2048, 10944, 27, 16, 16, 102400) | {
            "model_type": "deepseek_v2", "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6,
            "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
            "topk_method": "greedy", "rope_scaling": DEEPSEEK["rope_scaling"] | {
                "mscale": 0.707, "mscale_all_dim": 0.707
            },
        }, 15.706, 2.66,
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        QWEN_DELTA | QWEN_512 | sizes(2048, 5120, 48, 16, 2, 151936) | {
            "model_type": "qwen3_next", "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
            "num_experts": 512, "num_experts_per_tok": 10, "partial_rotary_factor": 0.25, "rope_scaling": None,
            "rope_theta": 10000000,
        }, 79.674, 3.87,
    ),
    "Qwen3.5-9B, text": (
        QWEN_DELTA | MROPE | sizes(4096, 12288, 32, 16, 4, 248320) | {"model_type": "qwen3_5_text"}, 8.954
    ),
    "Qwen3.5-35B-A3B, text": (
        QWEN_DELTA | QWEN_512 | MROPE | sizes(2048, None, 40, 16, 2, 248320)
        | {"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8}, 34.661, 3.45,
    ),
    "Olmo-Hybrid-7B": (
        OLMO_HYBRID | sizes(3840, 11008, 32, 30, 30, 100352) | {"model_type": "olmo_hybrid"}, 7.431
    ),
    "LFM2-1.2B": (
        LFM2 | sizes(2048, None, 16, 32, 8, 65536) | {
            "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "conv_dim": 2048,
            "full_attn_idxs": LFM2_ATTENDS, "num_heads": 32, "use_pos_enc": True,
        }, 1.170,
    ),
    "LFM2-8B-A1B": (
        LFM2 | sizes(2048, 7168, 24, 32, 8, 65536) | {
            "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_topk_prob": True, "num_dense_layers": 2,
            "num_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "use_expert_bias": True,
            "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        }, 8.34, 1.56,
    ),
    "LFM3-1.7B, transformers' defaults": (sizes(2048, 7680, 24, 16, 4, 128000) | {"model_type": "lfm3"}, 1.729),
    "EXAONE-4.0-32B": (
        sizes(5120, 27392, 64, 40, 8, 102400) | UNTIED | {
            "model_type": "exaone4", "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
            "layer_types": [FULL if i % 4 == 3 else SLIDING for i in range(64)],
            "rope_scaling": {
                "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        }, 32.003,
    ),
    "Seed-OSS-36B-Instruct": (
        sizes(5120, 27648, 64, 80, 8, 155136) | UNTIED | {
            "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
            "max_position_embeddings": 524288, "mlp_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
            "rope_scaling": {"rope_type": "default"},
        }, 36.151,
    ),
    "Muse-Glimmer-30B, text, transformers' defaults": (
        sizes(6656, 19968, 52, 32, 2, 202048) | {"model_type": "muse_glimmer_text"}, 27.853,
    ),
    "GLM-4.5": (
        GLM | sizes(5120, 12288, 92, 96, 8, 151552)
        | {"moe_intermediate_size": 1536, "n_routed_experts": 160, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 3, "use_qk_norm": True}, 352.8, 33.63,
    ),
    "granite-4.0-micro": (
        GRANITE4 | sizes(2560, 8192, 40, 40, 8, 100352) | {
            "attention_multiplier": 0.015625, "layer_types": ["attention"] * 40, "logits_scaling": 10.0,
            "mamba_d_head": "auto", "mamba_n_heads": 128,
            "num_experts_per_tok": 0, "num_local_experts": 0, "position_embedding_type": "rope",
            "shared_intermediate_size": 8192,
        }, 3.403,
    ),
    "granite-4.0-h-tiny": (
        GRANITE4_H | sizes(1536, 512, 40, 12, 4, 100352) | {
            "attention_multiplier": 0.0078125, "logits_scaling": 6.0, "mamba_n_heads": 48, "num_experts_per_tok": 6,
            "num_local_experts": 64, "shared_intermediate_size": 1024,
        }, 6.939, 1.47,
    ),
    "NVIDIA-Nemotron-Nano-9B-v2": (
        NEMOTRON | sizes(4480, 15680, 56, 40, 8, 131072) | {
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "head_dim": 128,
            "mamba_head_dim": 80, "mamba_num_heads": 128, "max_position_embeddings": 131072,
        }, 8.888,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        NEMOTRON | sizes(2688, 1856, 52, 32, 2, 131072) | {
            "head_dim": 128, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_head_dim": 64, "mamba_num_heads": 64, "max_position_embeddings": 262144,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
            "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.5, "topk_group": 1,
        }, 31.578, 3.58,
    ),
}  # fmt: skip
NAMED = {
    "deepseek-v3": "DeepSeek-V3", "glm-4.7-flash": "GLM-4.7-Flash, transformers' defaults",
    "mixtral-8x7b": "Mixtral-8x7B-v0.1", "qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b", "olmoe-1b-7b": "OLMoE-1B-7B-0924", "glm-4.5-air": "GLM-4.5-Air",
    "muse-glimmer-30b": "Muse-Glimmer-30B, text, transformers' defaults",
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config(name, tmp_path):
    raw, billions, *used = RELEASED[name]
    config = to_llama_config(raw)
    folder = written(tmp_path / "released", raw)
    assert as_transformers_reads(folder) == config
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "saved")  # as transformers 5 writes it
    assert to_llama_config(json.loads((tmp_path / "saved" / "config.json").read_text())) == config
    fields = from_llama_config(config, "export")
    same = ("Mistral-7B-Instruct-v0.2", "Seed-OSS-36B-Instruct")  # a LLaMA without a window, a Qwen 2
    if name not in same:
        assert fields["model_type"] == raw["model_type"]
    assert to_llama_config(fields) == config
    assert as_transformers_reads(written(tmp_path / "export", fields)) == config

    all_sizes = {name: math.prod(shape) for name, shape in shapes(base_layout(config)).items()}
    total, in_experts = sum(all_sizes.values()), sum(size for key, size in all_sizes.items() if re.search(EXPERT, key))
    assert total / 1e9 == pytest.approx(billions, abs=0.005)
    if used:
        experts = config.any_experts
        one_token = total - in_experts * (1 - experts.per_token / experts.count)
        assert one_token / 1e9 == pytest.approx(used[0], abs=0.005)


def test_every_named_shape_is_a_released_one():
    assert {ours: to_llama_config(RELEASED[name][0]) for ours, name in NAMED.items()} == MIXTURES | DENSE
