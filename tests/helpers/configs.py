"""config.json files and their meaning in transformers, the independent source of defaults."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import torch
from transformers import AutoConfig, DeepseekV3Config, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from hydrajax.models.expert_settings import Experts
from hydrajax.models.latent_settings import Latent
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import GatedDelta, Mamba2, Recurrent, ShortConv
from hydrajax.models.rope_scaling import RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
MIXTRAL = "block_sparse_moe"
QWEN_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LFM = ("lfm2", "lfm2_moe", "lfm3")
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")


class MiMoConfig(Qwen2Config):
    """MiMo's class is in its repositories: Qwen 2's with another name."""

    model_type = "mimo"


class KimiK2Config(DeepseekV3Config):
    """Kimi K2's class is in its repositories: DeepSeek V3's with another name."""

    model_type = "kimi_k2"


AutoConfig.register("mimo", MiMoConfig)
AutoConfig.register("kimi_k2", KimiK2Config)


def written(folder: Path, raw: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def as_transformers_reads(folder: Path) -> LlamaConfig:
    """Return the meaning of a config.json in transformers, from its attributes and the behaviour of its models.

    A window of at least the context counts as no window.
    """
    hf = AutoConfig.from_pretrained(folder)
    if hf.model_type == "nemotron_h":
        return _nemotron(hf)
    if hf.model_type in GEMMA4:
        return _gemma4(hf)
    if hf.model_type in LATENT:
        return _latent(hf)
    kind, head_dim = hf.model_type, getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    ropes = hf.rope_parameters
    ropes = {
        name: _rope(ropes[name] if kind in ("gemma3_text", "olmo3", "lfm3") else ropes, hf) for name in (FULL, SLIDING)
    }
    theta, scaling = ropes[FULL]
    context = hf.max_position_embeddings
    if scaling is not None and scaling.kind == "longrope":
        context = min(context, scaling.original_max_position)
    window = getattr(hf, "sliding_window", None)
    window = window if window is not None and window < context else None
    types = getattr(hf, "layer_types", None) or [SLIDING] * hf.num_hidden_layers
    window = window or None  # Qwen 2 MoE's is 0 without windows
    if kind == "granitemoehybrid" and hf.position_embedding_type != "rope":
        ropes[FULL] = theta, scaling = None, None
    layers = [
        LayerKind(None, None, None, e, "before" if kind == "olmo_hybrid" else None, _recurrent(hf))
        if name == "linear_attention"
        else LayerKind(None, None, None, e, None, _short_conv(hf))
        if name == "conv"
        else LayerKind(window if name == SLIDING else None, *ropes[name], e)
        for name, e in zip(types, _experts(hf), strict=False)
    ]
    if kind == "smollm3":
        rotated = zip(layers, hf.no_rope_layers, strict=False)
        layers = [k if rotates else LayerKind(k.sliding_window, None, None) for k, rotates in rotated]
    if kind == "exaone4" and hf.sliding_window is not None:
        layers = [LayerKind(None, None, None) if name == FULL else k for k, name in zip(layers, types, strict=True)]
    if kind == "muse_glimmer_text":
        rotated = zip(layers, hf.layer_rope_theta, strict=False)
        layers = [k if theta else LayerKind(k.sliding_window, None, None) for k, theta in rotated]
    if len(set(layers)) == 1:
        own, layers = layers[0], ()
    else:
        own = LayerKind(None, theta, scaling)
    part = hf.rope_parameters.get("partial_rotary_factor", 1) if kind in ("phi3", "glm4_moe", *QWEN_HYBRIDS) else 1
    settings = {}
    if kind in ("gemma2", "gemma3_text"):
        settings = {
            "norms": "both",
            "norm_offset": True,
            "embedding_scale": hf.hidden_size**0.5,
            "attention_scale": None if hf.query_pre_attn_scalar == head_dim else hf.query_pre_attn_scalar**-0.5,
            "logits_softcap": hf.final_logit_softcapping,
            "attention_softcap": hf.attn_logit_softcapping if kind == "gemma2" else None,  # Gemma 3 has no use for it
        }
    if kind in ("granite", "granitemoehybrid"):
        scale = float(hf.attention_multiplier)
        settings = {
            "embedding_scale": float(hf.embedding_multiplier),
            "residual_scale": float(hf.residual_multiplier),
            "attention_scale": None if math.isclose(scale, head_dim**-0.5) else scale,
            "logits_divisor": float(hf.logits_scaling),
        }
    if kind == "granitemoehybrid":
        settings |= {"names": kind, "recurrent": own.recurrent}
    if kind in QWEN_HYBRIDS:
        settings = {"norm_offset": True, "attention_gate": True, "recurrent": own.recurrent}
    if kind in ("lfm2", "lfm2_moe"):
        settings = {"recurrent": own.recurrent, "names": "lfm2"}
    if kind == "gpt_oss":
        settings = {"attention_sinks": True, "out_bias": hf.attention_bias, "names": kind}
    if kind == "lfm3":
        norms = ("both", "lfm3 with norms after") if hf.use_sandwich_norm else ("before", "lfm3")
        settings = {
            "recurrent": own.recurrent,
            "head_gate": hf.use_attention_gate,
            "norms": norms[0],
            "names": norms[1],
        }
    if kind == "muse_glimmer_text":
        settings = {
            "norms": "both", "norm_offset": True, "final_norm_offset": False, "norm_scales": "layers",
            "out_norm_eps": hf.post_norm_eps, "embedding_norm": True, "attention_gate": True, "names": "muse_glimmer",
            "attention_scale": hf.qk_scale_factor * head_dim**-0.5, "logits_divisor": 1 / hf.output_multiplier,
            "logits_softcap": hf.final_logit_softcapping,
        }  # fmt: skip
    activation = hf.hidden_activation if kind.startswith(("gemma", "muse")) else getattr(hf, "hidden_act", "silu")
    found = LlamaConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        # Qwen 3.5's mixtures have no MLP: one of a token's experts together.
        mlp_width=_lfm2_width(hf)
        if kind == "lfm2"
        else getattr(hf, "shared_intermediate_size", None)
        or getattr(hf, "intermediate_size", None)
        or hf.num_experts_per_tok * hf.moe_intermediate_size + hf.shared_expert_intermediate_size,
        n_layers=hf.num_hidden_layers,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_positions=context,
        norm_eps=hf.norm_eps if kind in LFM else hf.rms_norm_eps,
        rope_theta=own.rope_theta,
        rope_scaling=own.rope_scaling,
        tied_lm_head=hf.tie_word_embeddings,
        qkv_bias=kind in ("qwen2", "mimo")
        or (kind == "qwen2_moe" and hf.qkv_bias)
        or (kind in ("glm4_moe", "gpt_oss") and hf.attention_bias),
        qk_norm=kind in ("qwen3", "gemma3_text", "qwen3_moe", "muse_glimmer_text", "exaone4", *QWEN_HYBRIDS, *LFM)
        or (kind == "glm4_moe" and hf.use_qk_norm),
        sliding_window=own.sliding_window,
        qk_norm_all_heads=kind in ("olmo2", "olmo3", "olmoe", "olmo_hybrid"),
        rotary_dim=None if part == 1 else int(head_dim * part),
        layer_kinds=tuple(layers),
        activation="silu" if activation == "silu" else "gelu_tanh",
        fused_projections=kind == "phi3",
        experts=own.experts,
        **({"norms": "after"} if kind in ("olmo2", "olmo3", "olmo_hybrid", "exaone4") else settings),
    )
    if kind == "seed_oss":
        return found.replace(qkv_bias=hf.attention_bias, out_bias=hf.attention_out_bias)
    normed = {"qk_norm": True, "norm_after_rope": True, "names": kind}
    if kind == "hunyuan_v1_dense":
        return found.replace(qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, **normed)
    if kind == "nanochat":
        normed |= {"norm_scales": "none", "embedding_norm": True, "rope_reversed": True, "activation": hf.hidden_act}
        return found.replace(logits_softcap=hf.final_logit_softcapping, **normed)
    return found


def _gemma4(hf) -> LlamaConfig:
    hf.allow_global_per_layer_attribute_access = True
    ropes = {name: _rope(hf.rope_parameters[name], hf) for name in (FULL, SLIDING)}
    kinds = []
    for i, (name, shares) in enumerate(zip(hf.layer_types, hf.kv_sharing_modes, strict=True)):
        sizes = [getattr(hf.per_layer_config[i], name) for name in ("num_key_value_heads", "head_dim")]
        of_model = [hf.num_key_value_heads, hf.head_dim]
        kinds.append(
            LayerKind(
                hf.sliding_window if name == SLIDING else None, *ropes[name], None, None, None, True,
                *(None if size == whole else size for size, whole in zip(sizes, of_model, strict=True)),
                shared_kv=shares == "reuse",
            )
        )  # fmt: skip
    return LlamaConfig(
        hf.vocab_size, hf.hidden_size, hf.intermediate_size, hf.num_hidden_layers, hf.num_attention_heads,
        hf.num_key_value_heads, hf.head_dim, hf.max_position_embeddings, hf.rms_norm_eps, *ropes[FULL],
        tied_lm_head=hf.tie_word_embeddings, qk_norm=True, value_norm=True, norms="both", layer_scale=True,
        attention_scale=1.0, embedding_scale=hf.hidden_size**0.5, logits_softcap=hf.final_logit_softcapping,
        activation="gelu_tanh", layer_kinds=tuple(kinds), names="gemma4",
        per_layer_width=(p := getattr(hf, "hidden_size_per_layer_input", 0)),
        per_layer_vocab=hf.vocab_size_per_layer_input if p else 0,
    )  # fmt: skip


def _latent(hf) -> LlamaConfig:
    rope, scores = _rope(hf.rope_parameters, hf), hf.qk_nope_head_dim + hf.qk_rope_head_dim
    mscale = 0.0 if rope[1] is None else float(hf.rope_parameters.get("mscale_all_dim") or 0)
    router = {"scores": "sigmoid", "choice_bias": True, "normalized": getattr(hf, "norm_topk_prob", False)}
    grouped = hf.model_type != "deepseek_v2" or hf.topk_method == "group_limited_greedy"
    experts = Experts(
        hf.n_routed_experts, hf.num_experts_per_tok, hf.moe_intermediate_size,
        hf.n_shared_experts * hf.moe_intermediate_size, groups=hf.n_group if grouped else 1,
        chosen_groups=hf.topk_group if grouped else 1, scale=hf.routed_scaling_factor,
        **({"best_of_group": 1} if hf.model_type == "deepseek_v2" else router),
    )  # fmt: skip
    is_glm = hf.model_type == "glm4_moe_lite"
    types = hf.mlp_layer_types if is_glm else ["dense"] * hf.first_k_dense_replace + ["sparse"] * hf.num_hidden_layers
    latent = Latent(
        hf.kv_lora_rank, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim, hf.q_lora_rank,
        getattr(hf, "rope_interleave", True), mscale,
    )  # fmt: skip
    return LlamaConfig(
        hf.vocab_size, hf.hidden_size, hf.intermediate_size, hf.num_hidden_layers, hf.num_attention_heads, 1,
        hf.kv_lora_rank + hf.qk_rope_head_dim, hf.max_position_embeddings, hf.rms_norm_eps, *rope,
        tied_lm_head=hf.tie_word_embeddings, rotary_dim=hf.qk_rope_head_dim, latent=latent,
        activation="silu" if hf.hidden_act == "silu" else "gelu_tanh", qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias, attention_scale=yarn_apply_mscale(hf.rope_parameters, scores**-0.5),
        names="glm4_moe_lite" if is_glm else "llama",
    ).with_kinds(
        LayerKind(None, *rope, experts if kind == "sparse" else None)
        for kind, _ in zip(types, range(hf.num_hidden_layers), strict=False)
    )  # fmt: skip


def _nemotron(hf) -> LlamaConfig:
    mamba = Mamba2(
        hf.conv_kernel, hf.n_groups, hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size, hf.use_conv_bias,
        (hf.time_step_min, float("inf")), hf.layer_norm_epsilon,
    )  # fmt: skip
    experts = Experts(
        hf.n_routed_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, hf.moe_shared_expert_intermediate_size,
        scores="sigmoid", normalized=hf.norm_topk_prob, choice_bias=True, groups=hf.n_group,
        chosen_groups=hf.topk_group, scale=hf.routed_scaling_factor,
    )  # fmt: skip
    types = hf.layers_block_type
    layers = [  # with the block that follows
        LayerKind(
            None, None, None, experts if after == "moe" else None, None, mamba if kind == "linear_attention" else None,
            after in ("moe", "mlp"),
        )
        for kind, after in itertools.zip_longest(types, types[1:])
        if kind in ("linear_attention", FULL)
    ]  # fmt: skip
    return LlamaConfig(
        hf.vocab_size, hf.hidden_size, hf.intermediate_size, len(layers), hf.num_attention_heads,
        hf.num_key_value_heads, hf.head_dim, hf.max_position_embeddings, hf.layer_norm_epsilon, None,
        activation="relu2", names="nemotron_h",
    ).with_kinds(layers)  # fmt: skip


def _experts(hf) -> list[Experts | None]:
    """Return the experts of each layer."""
    kind, layers = hf.model_type, range(hf.num_hidden_layers)
    if kind == "gpt_oss":
        swiglu = hf.swiglu_alpha, hf.swiglu_limit
        of = Experts(
            hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, normalized=True, biases=True,
            swiglu=swiglu,
        )  # fmt: skip
        return [of for _ in layers]
    if kind == "mixtral":
        of = Experts(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, normalized=True, block=MIXTRAL)
        return [of for _ in layers]
    if kind == "granitemoehybrid":
        of = Experts(
            hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, hf.shared_intermediate_size,
            normalized=True,
        ) if hf.num_local_experts else None  # fmt: skip
        return [of for _ in layers]
    if kind == "olmoe":
        of = Experts(hf.num_experts, hf.num_experts_per_tok, hf.intermediate_size, normalized=hf.norm_topk_prob)
        return [of for _ in layers]
    if kind == "qwen3_5_moe_text":
        of = Experts(
            hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, hf.shared_expert_intermediate_size, True,
            normalized=True,
        )  # fmt: skip
        return [of for _ in layers]
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_next") and hf.num_experts:
        width = 0 if kind == "qwen3_moe" else hf.shared_expert_intermediate_size
        of = Experts(
            hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, width, width > 0,
            normalized=hf.norm_topk_prob,
        )  # fmt: skip
        dense = {i for i in layers if i in hf.mlp_only_layers or (i + 1) % hf.decoder_sparse_step}
        return [None if i in dense else of for i in layers]
    if kind == "glm4_moe":
        of = Experts(
            hf.n_routed_experts, hf.num_experts_per_tok, hf.moe_intermediate_size,
            hf.n_shared_experts * hf.moe_intermediate_size, scores="sigmoid", normalized=hf.norm_topk_prob,
            choice_bias=True, groups=hf.n_group, chosen_groups=hf.topk_group, scale=hf.routed_scaling_factor,
        )  # fmt: skip
        return [None if i < hf.first_k_dense_replace else of for i in layers]
    if kind == "lfm2_moe":
        of = Experts(
            hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, scores="sigmoid",
            normalized=hf.norm_topk_prob, choice_bias=hf.use_expert_bias, scale=hf.routed_scaling_factor, tiny=1e-6,
        )  # fmt: skip
        return [None if i < hf.num_dense_layers else of for i in layers]
    return [None for _ in layers]


def _recurrent(hf) -> Recurrent:
    """Return the layers that keep a state."""
    if hf.model_type == "granitemoehybrid":
        return Mamba2(
            hf.mamba_d_conv, hf.mamba_n_groups, hf.mamba_n_heads, hf.mamba_d_head, hf.mamba_d_state, hf.mamba_conv_bias,
            tuple(hf.time_step_limit), hf.rms_norm_eps,
        )  # fmt: skip
    own = {"names": "qwen3_next" if hf.model_type == "qwen3_next" else "qwen3_5", "norm_eps": hf.rms_norm_eps}
    if hf.model_type == "olmo_hybrid":  # the norm's own default
        own = {"names": "olmo_hybrid", "norm_eps": 1e-5, "most_beta": 2.0 if hf.linear_allow_neg_eigval else 1.0}
    return GatedDelta(
        hf.linear_conv_kernel_dim, hf.linear_num_key_heads, hf.linear_num_value_heads, hf.linear_key_head_dim,
        hf.linear_value_head_dim, **own,
    )  # fmt: skip


def _short_conv(hf) -> ShortConv:
    groups = hf.num_key_value_heads if hf.hidden_size % hf.num_key_value_heads == 0 else 1
    return ShortConv(hf.conv_L_cache, hf.hidden_size, groups, hf.conv_bias)


def _lfm2_width(hf) -> int:
    with torch.device("meta"):
        return Lfm2MLP(hf).w1.out_features


def _rope(rope: dict, hf) -> tuple[float | None, RopeScaling | None]:
    if rope["rope_theta"] is None:  # OLMo hybrid as released
        return None, None
    kind = rope["rope_type"]
    theta, context = float(rope["rope_theta"]), rope.get("original_max_position_embeddings")
    if kind == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return theta, RopeScaling("llama3", *(float(rope[name]) for name in names), context)
    if kind == "default":
        return theta, None
    if kind == "dynamic":  # HunYuan's
        return theta * rope["alpha"] ** (hf.head_dim / (hf.head_dim - 2)), None
    if kind == "proportional":
        return theta, RopeScaling(kind, rope.get("factor", 1.0), part=rope.get("partial_rotary_factor", 1.0))
    layer_type = None if rope is hf.rope_parameters else FULL
    settings = {
        "original_max_position": context,
        "attention_factor": ROPE_INIT_FUNCTIONS[kind](hf, layer_type=layer_type)[1],
    }
    if kind == "longrope":
        lists = {f"{name}_factors": tuple(rope[f"{name}_factor"]) for name in ("short", "long")}
        return theta, RopeScaling(kind, hf.max_position_embeddings / context, **settings, **lists)
    settings |= {"beta_fast": float(rope.get("beta_fast") or 32), "beta_slow": float(rope.get("beta_slow") or 1)}
    settings |= {"query_beta": rope["llama_4_scaling_beta"]} if hf.model_type == "ministral3" else {}
    return theta, RopeScaling(kind, float(rope["factor"]), **settings, truncate=rope.get("truncate", True))


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, vocab: int) -> dict:
    fields = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
    }
    return {name: value for name, value in fields.items() if value is not None}
