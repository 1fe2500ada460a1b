"""Names of tensors in the files of families that do not have LLaMA's names."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from hydrajax.models.layout import Shape
from hydrajax.models.llama_config import LlamaConfig

_LFM = {
    "input_layernorm": "operator_norm",
    "norm": "embedding_norm",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_LFM_BEFORE = _LFM | {"post_attention_layernorm": "ffn_norm"}
_LFM_BOTH = _LFM | {
    "post_attention_layernorm": "post_operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
# By `LlamaConfig.names`: parts of LLaMA's names of tensors, and what a family's files have in their places.
NAMES = {
    "llama": {},
    "lfm2": _LFM_BEFORE
    | {
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "gate.e_score_correction_bias": "expert_bias",
        "experts.down_proj": "experts.down_proj",  # of all experts together
    },
    "lfm3": _LFM_BEFORE | {"g_proj": "gate_proj"},
    "lfm3 with norms after": _LFM_BOTH | {"g_proj": "gate_proj"},
    "granitemoehybrid": {
        "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    },
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "muse_glimmer": {},
    "glm4_moe_lite": {},
    "hunyuan_v1_dense": {"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    "nanochat": {"up_proj": "fc1", "down_proj": "fc2"},
    "gemma4": {
        "mlp.gate": "router.proj",
        "mlp.experts.gate_up_proj": "experts.gate_up_proj",
        "mlp.experts.down_proj": "experts.down_proj",
    },
    "nemotron_h": {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"},
}
FUSED_MLP = ("granitemoehybrid",)  # gate and up are one tensor
FUSED_EXPERTS = (*FUSED_MLP, "gemma4")  # the experts of a layer are one tensor
NO_FILES: Mapping[str, Shape] = {}
# Names of norms in OLMo hybrid's released files, which transformers renames.
RELEASED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def first_in(names: Container[str], *candidates: str) -> str:
    """Return the first candidate that is one of the names; if none is, the first candidate."""
    return next((name for name in candidates if name in names), candidates[0])


def in_files(name: str, c: LlamaConfig) -> str:
    """Return the name of a base's tensor in its family's files.

    Args:
        name: in LLaMA's files.
        c: the base's shape.
    """
    names = NAMES[c.names]
    if c.names == "nemotron_h" and name.startswith("model.layers."):
        return _of_block(name, c)
    every = "|".join(map(re.escape, names))
    return re.sub(rf"\b({every})\b", lambda found: names[found[0]], name) if names else name


def _of_block(name: str, c: LlamaConfig) -> str:
    """Return the name in Nemotron-H, which counts attention and MLP as blocks of their own, with a norm each."""
    _, _, layer, part, rest = name.split(".", 4)
    block = sum(1 + kind.mlp for kind in c.kinds[: int(layer)]) + (part in ("post_attention_layernorm", "mlp"))
    return f"backbone.layers.{block}.{'norm' if part.endswith('layernorm') else 'mixer'}.{rest}"
