"""Configurations of other JAX programs as fields of a ``config.json``, from which families are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.families.config_fields import FULL, SLIDING
from hydrajax.families.family_registry import to_llama_config
from hydrajax.formats.huggingface import read_config
from hydrajax.models.expert_settings import Experts
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling

CONTEXT = 32_768  # of configurations without one
# tunix 0.1.7 rotates Llama 3 and Qwen 3 with this base, whatever the configuration's; so does the policy.
ROPE_THETA = 1_000_000.0


def config_of(given: Any, max_positions: int | None = None) -> LlamaConfig:
    """Return the configuration of a base.

    Args:
        given: a `LlamaConfig`, a directory with a ``config.json``, the fields of one, or the configuration of a model
            of tunix, gemma or MaxText.
        max_positions: the context; None for the configuration's own, or `CONTEXT` where it has none.

    Raises:
        HydrajaxError: for a configuration that is not supported.
    """
    if max_positions is not None and max_positions < 1:
        raise HydrajaxError(f"max_positions: got {max_positions}, expected at least 1")
    if isinstance(given, (str, Path)):
        given = read_config(given)
    program = program_of(given)
    if program is not None:
        return PROGRAMS[program](given, max_positions or CONTEXT)
    elif isinstance(given, Mapping):
        given = to_llama_config(dict(given), "config")
    elif not isinstance(given, LlamaConfig):
        expected = "a LlamaConfig, the fields of a config.json, a directory with one, or a configuration of "
        raise HydrajaxError(f"config: got {type(given).__name__}, expected {expected}{', '.join(PROGRAMS)}")
    return given if max_positions is None else given.replace(max_positions=max_positions)


def program_of(given: Any) -> str | None:
    """Return the program whose configuration this is."""
    if isinstance(given, Mapping):
        return "maxtext" if "base_emb_dim" in given else None
    package = type(given).__module__.partition(".")[0].lower()
    return package if package in PROGRAMS else None


def _tunix(given: Any, context: int) -> LlamaConfig:
    family = type(given).__module__.removesuffix(".model").rpartition(".")[2]
    if family not in TUNIX:
        raise not_allowed("config", f"tunix.models.{family}", TUNIX)
    fields = {"max_position_embeddings": context} | _shared(given) | TUNIX[family](given)
    return to_llama_config(fields, f"config: tunix.models.{family}")


def _shared(c: Any) -> dict[str, Any]:
    """Return the fields that all models of tunix and gemma have."""
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
    return [SLIDING if kind.name == "LOCAL_SLIDING" else FULL for kind in kinds]


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
    per_head = c.embed_dim // c.num_heads
    scalars = {  # the scale to the power of -2
        "BY_EMBED_DIM_DIV_NUM_HEADS": float(per_head) ** -2,
        "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS": per_head,
    }
    rope = {
        FULL: _rope(c.global_base_frequency, c.global_scale_factor),
        SLIDING: _rope(c.local_base_frequency, c.local_scale_factor),
    }
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scalars.get(c.query_pre_attn_norm.name, c.head_dim),
        "sliding_window": c.sliding_window_size,
        "rope_parameters": rope,
    }


def _gemma4(c: Any) -> dict[str, Any]:
    """Return the fields of a configuration of Gemma 4, in tunix or gemma."""
    pattern = _types(getattr(c, "attention_types", None) or c.attention_pattern or ()) or [*[SLIDING] * 5, FULL]
    types = [pattern[i % len(pattern)] for i in range(c.num_layers)]
    sharing, wide = getattr(c, "kv_cache_sharing_config", c), c.override_kv_shared_ffw_hidden
    own = int(c.num_layers - (sharing.frac_shared_layers if sharing else 0.0) * c.num_layers)
    if own < c.num_layers and types[own - 2 : own] != [SLIDING, FULL]:
        raise HydrajaxError(f"config: got {types[:own][-2:]} before shared keys and values, expected a window first")
    others = {name: getattr(c, name, None) for name in ("attn_logits_soft_cap", "enable_moe")}
    others["the last layer"] = types[-1] != FULL and types[-1]
    others["override_kv_shared_ffw_hidden"] = wide not in (None, c.hidden_dim, 2 * c.hidden_dim) and wide
    for name, value in others.items():
        if value:
            raise HydrajaxError(f"config: {name}: got {value}, expected that of a dense Gemma 4")
    whole = {
        "head_dim": c.global_key_size or c.head_dim,
        "num_key_value_heads": c.num_global_kv_heads or c.num_kv_heads,
    }
    proportional = {"rope_type": "proportional", "partial_rotary_factor": c.global_rope_proportion}
    rope = {"rope_theta": float(c.global_base_frequency), "factor": c.global_scale_factor} | proportional
    return {
        "model_type": "gemma4_text",
        "attention_k_eq_v": c.k_eq_v_global,
        "final_logit_softcapping": c.final_logit_softcap,
        "hidden_size_per_layer_input": c.per_layer_input_dim,
        "layer_types": types,
        "num_kv_shared_layers": c.num_layers - own,
        "per_layer_config": {str(i): whole for i, kind in enumerate(types) if kind == FULL},
        "rope_parameters": {FULL: rope, SLIDING: _rope(c.local_base_frequency, c.local_scale_factor)},
        "sliding_window": c.sliding_window_size,
        "use_double_wide_mlp": wide == 2 * c.hidden_dim,
        "vocab_size_per_layer_input": c.num_embed,
    }


def _gemma_package(c: Any, context: int) -> LlamaConfig:
    """Return a configuration of google-deepmind's gemma, where one class has all settings of Gemma 2 and 3."""
    module = type(c).__module__
    if not module.endswith(("nn._config", "gemma4._config")):
        raise HydrajaxError(f"config: got a {type(c).__name__} of {module}, expected one of Gemma 2, 3 or 4")
    fields = {"max_position_embeddings": context} | _shared(c)
    if module.endswith("gemma4._config"):
        return to_llama_config(fields | _gemma4(c), "config: gemma")
    found = to_llama_config(fields | _gemma(c) | _gemma3(c), "config: gemma")
    return found.replace(qk_norm=c.use_qk_norm, attention_softcap=c.attn_logits_soft_cap)


def _rope(theta: float, factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return {"rope_theta": float(theta)} | scaling


TUNIX = {  # by package
    "llama3": lambda c: {"model_type": "llama", "tie_word_embeddings": c.weight_tying, "rope_theta": ROPE_THETA},
    "qwen2": lambda c: {"model_type": "qwen2", "tie_word_embeddings": c.use_tied_embedding},
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}


# MaxText's decoder blocks. The weights of queries of the first ones have the scale of the scores in them.
FOLDED = "llama2", "mistral", "gemma2"
BLOCKS = *FOLDED, "gemma3", "qwen2", "qwen3", "qwen3_moe"
MAXTEXT = {  # values of base.yml that are not 0
    "mlp_activations": ("silu", "linear"),
    "normalization_layer_epsilon": 1e-5,
    "normalize_embedding_logits": True,
    "param_scan_axis": 1,
    "rope_linear_scaling_factor": 1.0,
    "rope_max_timescale": 10_000,
    "rope_min_timescale": 1,
    "rope_type": "default",
    "rope_use_scale": True,
}
UNSUPPORTED = ("attention_sink", "fused_mlp", "fused_qkv", "mlp_bias", "share_kv_projections")
ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh"}


class MaxText:
    """The fields of a configuration of MaxText.

    Args:
        given: an object of its ``pyconfig``, or a dict: a model's YAML file with its ``model_name``.
    """

    def __init__(self, given: Any):
        self._get = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
        if self.decoder_block not in BLOCKS:
            raise not_allowed("config: decoder_block", self.decoder_block, BLOCKS)
        for name in ("model_name", "vocab_size", "emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads", "head_dim"):
            if not getattr(self, name):
                raise HydrajaxError(f"config: {name}: got none, expected that of MaxText's configuration")
        for name in UNSUPPORTED:
            if getattr(self, name):
                raise HydrajaxError(f"config: {name}: got {getattr(self, name)}, expected none")

    def __getattr__(self, name: str) -> Any:
        for found in (self._get(name), self._get(f"base_{name}"), MAXTEXT.get(name)):
            if found is not None:
                return getattr(found, "value", found)  # of an enum
        return None

    @property
    def interleaved(self) -> bool:
        """The rotary embedding turns neighbours."""
        return self.model_name.startswith("llama3.1") or self.rope_type.lower().startswith("llama3.1")

    def config(self, context: int) -> LlamaConfig:
        """Return the configuration that means MaxText's arrays as they are.

        Queries have the scale of the scores in them, Gemma's embedding has its scale in it, by which logits are
        divided, and norms multiply by their weight.
        """
        block, gate, *others = self.decoder_block, *self.mlp_activations
        if gate not in ACTIVATIONS or others != ["linear"]:
            raise HydrajaxError(f"config: mlp_activations: got {[gate, *others]}, expected silu or gelu, and linear")
        if not (self.interleaved or self.rope_type.lower() == "default") or self.rope_min_timescale != 1:
            raise HydrajaxError(f"config: rope_type: got '{self.rope_type}', expected default or llama3.1")
        scaling, tied = None, bool(self.logits_via_embedding)
        if self.interleaved:
            scaling = RopeScaling("llama3", 8.0) if self.rope_use_scale else None
        elif self.rope_linear_scaling_factor != 1:
            scaling = RopeScaling("linear", self.rope_linear_scaling_factor)
        c = LlamaConfig(
            vocab_size=self.vocab_size,
            width=self.emb_dim,
            mlp_width=self.mlp_dim,
            n_layers=self.num_decoder_layers * (2 if block == "gemma2" else 1),
            n_heads=self.num_query_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=context,
            norm_eps=float(self.normalization_layer_epsilon),
            rope_theta=float(self.rope_max_timescale),
            rope_scaling=scaling,
            tied_lm_head=tied,
            qkv_bias=block == "qwen2" and bool(self.attention_bias),
            qk_norm=block.startswith("qwen") and bool(self.use_qk_norm),
            activation=ACTIVATIONS[gate],
            attention_scale=1.0 if block in FOLDED else None,
            attention_softcap=(block in ("llama2", "gemma2", "gemma3") and self.attn_logits_soft_cap) or None,
            logits_divisor=self.emb_dim**0.5 if tied and self.normalize_embedding_logits else 1.0,
            logits_softcap=(tied and self.final_logits_soft_cap) or None,
        )
        if block == "qwen3_moe":
            return c.replace(
                experts=Experts(self.num_experts, self.num_experts_per_tok, self.moe_mlp_dim, normalized=True)
            )
        return self._gemma(c) if block.startswith("gemma") else c

    def _gemma(self, c: LlamaConfig) -> LlamaConfig:
        if not (self.use_post_attn_norm and self.use_post_ffw_norm and c.norm_eps == 1e-6) or self.interleaved:
            raise HydrajaxError("config: got other norms or rotary embeddings than those of MaxText's Gemma 2 and 3")
        local, scaling, every = self.local_rope_max_timescale or 0, c.rope_scaling, 2
        if self.decoder_block == "gemma3":
            scalars = {"gemma3-4b": c.head_dim, "gemma3-12b": c.head_dim, "gemma3-27b": c.width // c.n_heads}
            if self.model_name not in scalars:
                raise not_allowed("config: model_name", self.model_name, scalars)
            c, scaling, every = c.replace(qk_norm=True, attention_scale=scalars[self.model_name] ** -0.5), None, 6
        full = LayerKind(None, c.rope_theta, c.rope_scaling)
        sliding = LayerKind(self.sliding_window_size, float(local) if local > 0 else c.rope_theta, scaling)
        kinds = [full if i % every == every - 1 else sliding for i in range(c.n_layers)]
        return c.replace(norms="both").with_kinds(kinds)


PROGRAMS = {"tunix": _tunix, "gemma": _gemma_package, "maxtext": lambda given, context: MaxText(given).config(context)}
