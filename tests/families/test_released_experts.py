"""config.json of released mixtures of experts: read as transformers does, written back unchanged, and their sizes."""

from __future__ import annotations

import json
import math

import pytest
from transformers import AutoConfig

from helpers.configs import as_transformers_reads, sizes, written
from hydrajax.bench.shapes import MIXTURES
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.models.layout import shapes

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
# With the parameters of the model, and those that one token uses, in billions.
RELEASED = {
    "Mixtral-8x7B-v0.1": (
        sizes(4096, 14336, 32, 32, 8, 32000)
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        46.70,
        12.88,
    ),
    "Qwen3-30B-A3B": (
        sizes(2048, 6144, 48, 32, 4, 151936) | QWEN3 | {"moe_intermediate_size": 768, "max_window_layers": 48},
        30.53,
        3.35,
    ),
    "Qwen3-235B-A22B": (
        sizes(4096, 12288, 94, 64, 4, 151936) | QWEN3 | {"moe_intermediate_size": 1536, "max_window_layers": 94},
        235.09,
        22.19,
    ),
    "OLMoE-1B-7B-0924": (
        sizes(2048, 1024, 16, 16, 16, 50304)
        | {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        6.92,
        1.28,
    ),
    "Qwen1.5-MoE-A2.7B": (
        sizes(2048, 5632, 24, 16, 16, 151936)
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        14.32,
        2.69,
    ),
    "GLM-4.5-Air": (
        sizes(4096, 10944, 46, 96, 8, 151552)
        | GLM
        | {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        106.85,
        13.42,
    ),
    "GLM-4.5": (
        sizes(5120, 12288, 92, 96, 8, 151552)
        | GLM
        | {
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
        352.8,
        33.63,
    ),
}
# Those that `hydrajax.bench.shapes` has by name.
NAMED = {
    "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "OLMoE-1B-7B-0924": "olmoe-1b-7b",
    "GLM-4.5-Air": "glm-4.5-air",
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config(name, tmp_path):
    raw, billions, used = RELEASED[name]
    config = to_llama_config(raw)
    if name in NAMED:
        assert config == MIXTURES[NAMED[name]]
    folder = written(tmp_path / "released", raw)
    assert as_transformers_reads(folder) == config
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert to_llama_config(json.loads((tmp_path / "saved" / "config.json").read_text())) == config
    fields = from_llama_config(config, "export")
    assert fields["model_type"] == raw["model_type"]
    assert to_llama_config(fields) == config
    assert as_transformers_reads(written(tmp_path / "export", fields)) == config

    all_sizes = {name: math.prod(shape) for name, shape in shapes(base_layout(config)).items()}
    in_experts = sum(size for name, size in all_sizes.items() if ".experts." in name)
    total, experts = sum(all_sizes.values()), config.any_experts
    assert total / 1e9 == pytest.approx(billions, abs=0.005)
    one_token = total - in_experts * (1 - experts.per_token / experts.count)
    assert one_token / 1e9 == pytest.approx(used, abs=0.005)


def test_every_shape_with_experts_is_a_released_one():
    assert set(NAMED.values()) == set(MIXTURES)
