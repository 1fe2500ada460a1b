"""config.json of released models of every family: read as transformers does, and written back unchanged."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from helpers.configs import as_transformers_reads, sizes, written
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.models.llama_config import LlamaConfig, RopeScaling

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5}
MISTRAL |= sizes(4096, 14336, 32, 32, 8, 32000) | {"max_position_embeddings": 32768, "tie_word_embeddings": False}
MISTRAL_SIZES = (32000, 4096, 14336, 32, 32, 8, 128)

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
