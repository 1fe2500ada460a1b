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
}
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
    every = "|".join(map(re.escape, names))
    return re.sub(rf"\b({every})\b", lambda found: names[found[0]], name) if names else name
