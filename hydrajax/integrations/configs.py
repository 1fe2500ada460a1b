"""Configurations of other JAX programs as fields of a ``config.json``, from which families are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.families.family_registry import to_llama_config
from hydrajax.formats.huggingface import read_config
from hydrajax.models.llama_config import LlamaConfig

CONTEXT = 32_768  # of configurations without one
# tunix 0.1.7 rotates Llama 3 and Qwen 3 with this base, whatever the configuration's; so does the policy.
ROPE_THETA = 1_000_000.0


def config_of(given: Any, max_positions: int | None = None) -> LlamaConfig:
    """Return the configuration of a base.

    Args:
        given: a `LlamaConfig`, a directory with a ``config.json``, the fields of one, or the configuration of a model
            of tunix.
        max_positions: the context; None for the configuration's own, or `CONTEXT` where it has none.

    Raises:
        HydrajaxError: for a configuration that is not supported.
    """
    if isinstance(given, (str, Path)):
        given = read_config(given)
    if isinstance(given, Mapping):
        given = to_llama_config(dict(given), "config")
    if not isinstance(given, LlamaConfig):
        package, _, family = type(given).__module__.removesuffix(".model").rpartition(".models.")
        if package != "tunix":
            expected = "a LlamaConfig, the fields of a config.json, a directory with one, or a configuration of tunix"
            raise HydrajaxError(f"config: got {type(given).__name__}, expected {expected}")
        if family not in TUNIX:
            raise not_allowed("config", f"tunix.models.{family}", TUNIX)
        fields = {"max_position_embeddings": max_positions or CONTEXT} | _shared(given) | TUNIX[family](given)
        given = to_llama_config(fields, f"config: tunix.models.{family}")
    return given if max_positions is None else given.replace(max_positions=max_positions)


def _shared(c: Any) -> dict[str, Any]:
    """Return the fields that all models of tunix have."""
    return {
        "vocab_size": getattr(c, "vocab_size", None) or c.num_embed,
        "hidden_size": c.embed_dim,
        "intermediate_size": c.hidden_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": getattr(c, "norm_eps", 1e-6),
        "rope_theta": getattr(c, "rope_theta", 10_000.0),
    }


def _llama3(c: Any) -> dict[str, Any]:
    return {"model_type": "llama", "tie_word_embeddings": c.weight_tying, "rope_theta": ROPE_THETA}


def _qwen2(c: Any) -> dict[str, Any]:
    return {"model_type": "qwen2", "tie_word_embeddings": c.use_tied_embedding}


def _qwen3(c: Any) -> dict[str, Any]:
    fields = {"model_type": "qwen3", "tie_word_embeddings": c.use_tied_embedding, "rope_theta": ROPE_THETA}
    if c.num_experts is None:
        return fields
    return fields | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": c.hidden_dim,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "norm_topk_prob": True,
    }


def _types(kinds: Any) -> list[str]:
    return ["sliding_attention" if kind.name == "LOCAL_SLIDING" else "full_attention" for kind in kinds]


def _gemma(c: Any) -> dict[str, Any]:
    if not (c.use_post_attn_norm and c.use_post_ffw_norm):
        raise HydrajaxError("config: got Gemma 1, expected Gemma 2 or later")
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": c.head_dim,
        "final_logit_softcapping": c.final_logit_softcap,
        "attn_logit_softcapping": c.attn_logits_soft_cap,
        "sliding_window": c.sliding_window_size,
        "layer_types": _types(c.attention_types),
    }


def _gemma3(c: Any) -> dict[str, Any]:
    by_heads = c.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS"
    rope = {
        "full_attention": _rope(c.global_base_frequency, c.global_scale_factor),
        "sliding_attention": _rope(c.local_base_frequency, c.local_scale_factor),
    }
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": c.embed_dim // c.num_heads if by_heads else c.head_dim,
        "sliding_window": c.sliding_window_size,
        "rope_parameters": rope,
    }


def _rope(theta: float, factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return {"rope_theta": float(theta)} | scaling


TUNIX = {"llama3": _llama3, "qwen2": _qwen2, "qwen3": _qwen3, "gemma": _gemma, "gemma3": _gemma3}  # by package
