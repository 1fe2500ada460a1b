"""The ``config.json`` of published EAGLE drafts, in full size with nothing allocated.

The official code's are its training settings, which the published directories repeat. The others have their authors'
sizes and layers, and the further fields as the programs write them.
"""

import math

import pytest
import torch

from helpers.torch_eagle import Eagle1
from helpers.torch_eagle import Eagle3 as TorchEagle3
from hydrajax.bench.shapes import PRESETS, SHAPES
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.formats.draft_registry import formats
from hydrajax.formats.tensors import expect_tensors
from hydrajax.models.layout import shapes
from hydrajax.models.llama_config import LlamaConfig

LLAMA_8B = PRESETS["8b"]
QWEN3_4B = LlamaConfig(151_936, 2560, 9728, 36, 32, 8, 128, 40_960, qk_norm=True, tied_lm_head=True)
QWEN3_8B = LlamaConfig(151_936, 4096, 12_288, 36, 32, 8, 128, 40_960, qk_norm=True)
QWEN3_32B = LlamaConfig(151_936, 5120, 25_600, 64, 64, 8, 128, 40_960, qk_norm=True)
# The shapes of Qwen 3 235B without experts.
WIDE = LlamaConfig(151_936, 4096, 12_288, 94, 64, 4, 128, 40_960, qk_norm=True)
KNOWN = 32_000  # tokens of the EAGLE-3 drafts


class Shapes(dict):
    """Tensor files without contents: ``{name: (shape, dtype)}``."""

    def shape(self, name):
        return self[name][0]

    def dtype(self, name):
        return self[name][1]

    def read(self, name):
        pytest.fail(f"{name} is read")


def file_of(config: dict, version: int, bias=False, released=True) -> Shapes:
    """Names and shapes of a draft's tensors, from torch modules; EAGLE-1 has a copy of the base's embedding."""
    width, heads, vocab = (config[name] for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim", width // heads)
    c = LlamaConfig(vocab, width, config["intermediate_size"], 1, heads, kv_heads, head_dim)
    with torch.device("meta"):
        state = (Eagle1(c, bias) if version == 1 else TorchEagle3(c, 3, KNOWN, released)).state_dict()
    dtypes = {torch.float32: "float16", torch.int64: "int64", torch.bool: "BOOL"}
    tensors = {name: (tuple(x.shape), dtypes[x.dtype]) for name, x in state.items()}
    return Shapes(tensors | ({"embed_tokens.weight": ((vocab, width), "float16")} if version == 1 else {}))


OLD = {  # what SafeAILab/EAGLE's have in common
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama",
    "num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
    "hidden_size": 4096, "max_position_embeddings": 2048, "num_attention_heads": 32, "pad_token_id": 0,
    "transformers_version": "4.28.1",
}  # fmt: skip
# eagle/train/vicuna_7B_config.json of SafeAILab/EAGLE, for yuhuili/EAGLE-Vicuna-7B-v1.3
VICUNA_7B = OLD | {
    "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 11_008, "rms_norm_eps": 1e-06, "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}  # fmt: skip
# eagle/train/EAGLE-LLaMA3-Instruct-8B.json, for yuhuili/EAGLE-LLaMA3-Instruct-8B and EAGLE-LLaMA3.1-Instruct-8B
LLAMA_3_8B = OLD | {
    "bos_token_id": 128_000, "eos_token_id": 128_001, "intermediate_size": 14_336, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "vocab_size": 128_256, "rope_theta": 500_000.0, "bias": False,
}  # fmt: skip
# eagle/traineagle3/config.json, for yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
LLAMA_31_8B_3 = {name: value for name, value in LLAMA_3_8B.items() if name not in ("rope_theta", "bias")}
LLAMA_31_8B_3 |= {"draft_vocab_size": 32_000}
# configs/qwen3-32b-eagle3.json of sgl-project/SpecForge
SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151_643, "eos_token_id": 151_645, "head_dim": 80, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 25_600, "max_position_embeddings": 40_960, "max_window_layers": 64,
    "model_type": "llama", "num_attention_heads": 64, "num_hidden_layers": 1, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1_000_000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151_936, "draft_vocab_size": 32_000,
}  # fmt: skip
# configs/qwen3-4b-eagle3.json there: its own lm head is marked as tied
SPECFORGE_4B = SPECFORGE | {"hidden_size": 2560, "intermediate_size": 9728, "max_window_layers": 36}
SPECFORGE_4B |= {"num_attention_heads": 32, "tie_word_embeddings": True}
# configs/gpt-oss-120B-eagle3.json there, for lmsys/EAGLE3-gpt-oss-120b-bf16
SPECFORGE_GPT_OSS = SPECFORGE | {"hidden_size": 2880, "intermediate_size": 17_280, "vocab_size": 201_088}
SPECFORGE_GPT_OSS |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10_000, "head_dim": 64}
SPECFORGE_GPT_OSS |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True}}
# AngelSlim's heads for Qwen 3, with vLLM's name of the class
ANGELSLIM_8B = SPECFORGE | {"architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 128, "hidden_size": 4096}
ANGELSLIM_8B |= {"intermediate_size": 12_288, "num_attention_heads": 32}
# nm-testing/Qwen3-235B-A22B-EAGLE3-converted-speculators-lmsys
LAYER = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 24_576,
    "max_position_embeddings": 262_144, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 1, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5_000_000,
    "vocab_size": 151_936,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "draft_vocab_size": 32_000, "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [1, 46, 90], "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["Qwen3MoeForCausalLM"], "name_or_path": "Qwen/Qwen3-235B-A22B-Instruct-2507"},
    },
    "speculators_version": "0.1.0.dev42", "target_hidden_size": None, "transformer_layer_config": LAYER,
}  # fmt: skip
# as RedHatAI's for Qwen 3 8B
SMALLER = {"intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1_000_000}
RED_HAT = SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [2, 18, 33], "norm_before_residual": True}
RED_HAT |= {"transformer_layer_config": LAYER | SMALLER}
EAGLE_1, EAGLE_3 = {"version": 1}, {"version": 3}
SPECULATED = EAGLE_3 | {"released": False}
PUBLISHED = {  # config.json, what the file holds, the base, and of the draft: heads, kv heads, head_dim, theta, eps
    "EAGLE-Vicuna-7B-v1.3": (VICUNA_7B, EAGLE_1 | {"bias": True}, PRESETS["7b"], (32, 32, 128, 1e4, 1e-6)),
    "EAGLE-LLaMA3.1-Instruct-8B": (LLAMA_3_8B, EAGLE_1, LLAMA_8B, (32, 8, 128, 5e5, 1e-5)),
    "EAGLE3-LLaMA3.1-Instruct-8B": (LLAMA_31_8B_3, EAGLE_3, LLAMA_8B, (32, 8, 128, 1e4, 1e-5)),
    "SpecForge's Qwen 3 32B": (SPECFORGE, EAGLE_3, QWEN3_32B, (64, 8, 80, 1e6, 1e-6)),
    "SpecForge's Qwen 3 4B": (SPECFORGE_4B, EAGLE_3, QWEN3_4B, (32, 8, 80, 1e6, 1e-6)),
    "SpecForge's gpt-oss-120b": (SPECFORGE_GPT_OSS, EAGLE_3, SHAPES["gpt-oss-120b"], (64, 8, 64, 1e4, 1e-5)),
    "AngelSlim's Qwen 3 8B": (ANGELSLIM_8B, EAGLE_3, QWEN3_8B, (32, 8, 128, 1e6, 1e-6)),
    "RedHatAI's Qwen 3 8B": (RED_HAT, SPECULATED, QWEN3_8B, (32, 8, 128, 1e6, 1e-6)),
    "speculators' Qwen 3 235B": (SPECULATORS, SPECULATED, WIDE, (64, 4, 128, 5e6, 1e-6)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafts_are_understood(name):
    config, holds, base, expected = PUBLISHED[name]
    layer = config.get("transformer_layer_config", config)
    version = holds["version"]
    files = file_of(layer, **holds)
    names = () if "speculators_model_type" in config else files.keys()
    (format,) = [format for format in formats() if format.recognises(config, names)]
    drafter = format.drafter(config, files, base)
    expect_tensors(files, shapes(format.layout(drafter, config)), name, format.ignored)

    assert type(drafter) is (Eagle3 if version == 3 else Eagle)
    c = drafter.config
    assert (c.n_heads, c.n_kv_heads, c.head_dim, c.rope_theta, c.norm_eps) == expected
    assert (c.width, c.vocab_size, c.mlp_width) == (base.width, base.vocab_size, layer["intermediate_size"])
    assert (c.n_layers, c.qk_norm, c.tied_lm_head) == (1, False, base.tied_lm_head)
    if version == 1:
        assert drafter.fc_bias == holds.get("bias", False)
    else:
        assert drafter.lm_head.size(base.vocab_size) == KNOWN
        layers = [1, 46, 90] if name.startswith("speculators") else [2, base.n_layers // 2, base.n_layers - 3]
        assert [base.n_layers - place for place in drafter.spec.aux_hidden_layers] == layers
        assert drafter.norm_before_residual == name.startswith("RedHatAI")
    whole = sum(
        math.prod(shape) for key, (shape, _) in files.items() if key not in ("embed_tokens.weight", "d2t", "t2d")
    )
    assert whole == sum(map(math.prod, shapes(format.layout(drafter, config)).values()))
