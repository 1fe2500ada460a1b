"""DeepSeek V2 and V3, Kimi K2 and GLM 4.7 Flash: the fields of their ``config.json`` that others do not have."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import integer, layer_types, rope_fields, unsupported
from hydrajax.families.expert_families import dense_layers, experts_of, grouped_experts, grouped_fields, with_experts
from hydrajax.families.family import Family
from hydrajax.models.latent_settings import Latent
from hydrajax.models.llama_config import LlamaConfig

V2, GLM = "deepseek_v2", "glm4_moe_lite"
# Fields, and `Latent`'s.
SIZES = {"kv_lora_rank": "rank", "qk_nope_head_dim": "nope_dim", "qk_rope_head_dim": "rope_dim"}
SIZES |= {"v_head_dim": "value_dim"}
# Fields of published files whose other values mean another model.
ALWAYS = {"moe_layer_freq": (1,), "partial_rotary_factor": (1,)}
OF_V3 = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
OF_V2 = {
    "topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",), "norm_topk_prob": (False,),
    "rope_interleave": (True,),
}  # fmt: skip


def _prepared(raw: dict) -> dict:
    return raw | {"head_dim": raw["qk_rope_head_dim"], "num_key_value_heads": None}


def _read(raw: dict, c: LlamaConfig) -> LlamaConfig:
    is_v2, is_glm = raw["model_type"] == V2, raw["model_type"] == GLM
    for name, values in (ALWAYS | (OF_V2 if is_v2 else OF_V3)).items():
        if raw.get(name) is not None and raw[name] not in values:
            raise unsupported(name, raw[name], " or ".join(map(repr, values)))

    mscale, stretch, query_rank = 0.0, 1.0, raw["q_lora_rank"]
    if c.rope_scaling is not None:
        mscale = float((raw.get("rope_scaling") or raw["rope_parameters"]).get("mscale_all_dim") or 0)
        stretch = 0.1 * mscale * math.log(c.rope_scaling.factor) + 1 if c.rope_scaling.factor > 1 else 1.0
    latent = Latent(
        **{ours: integer(raw[name]) for name, ours in SIZES.items()}, mscale=mscale,
        query_rank=None if query_rank is None else integer(query_rank), interleaved=bool(raw["rope_interleave"]),
    )  # fmt: skip
    c = c.replace(
        n_kv_heads=1, head_dim=latent.kept_dim, rotary_dim=latent.rope_dim, latent=latent,
        qkv_bias=bool(raw.get("attention_bias")), out_bias=bool(raw.get("attention_bias")),
        attention_scale=latent.key_dim**-0.5 * stretch * stretch, names=GLM if is_glm else "llama",
    )  # fmt: skip

    shared_width = integer(raw["moe_intermediate_size"]) * integer(raw["n_shared_experts"])
    if is_v2:
        names = ("n_group", "topk_group") if raw["topk_method"] == "group_limited_greedy" else ()
        groups = dict(zip(("groups", "chosen_groups"), (integer(raw[name]) for name in names), strict=False))
        experts = experts_of(
            raw, "n_routed_experts", "moe_intermediate_size", scale=float(raw["routed_scaling_factor"]),
            best_of_group=1, shared_width=shared_width, **groups,
        )  # fmt: skip
    else:
        experts = grouped_experts(raw, shared_width)
    first, named = integer(raw["first_k_dense_replace"]), raw.get("mlp_layer_types") if is_glm else None
    types = layer_types(
        {"layer_types": named}, c.n_layers, lambda i: "dense" if i < first else "sparse", ("dense", "sparse")
    )
    return with_experts(c, experts, (i for i, kind in enumerate(types) if kind == "dense"))


def _fields(c: LlamaConfig) -> dict[str, Any]:
    s, e = c.latent, c.any_experts
    if s is None or e is None:
        raise HydrajaxError("latent attention, experts: got none")
    dense, rope = dense_layers(c), rope_fields(c.rope_scaling)
    found = grouped_fields(c) | {name: getattr(s, ours) for name, ours in SIZES.items()} | {
        "q_lora_rank": s.query_rank, "rope_interleave": s.interleaved, "head_dim": s.rope_dim,
        "num_key_value_heads": c.n_heads, "attention_bias": c.qkv_bias,
        "rope_scaling": rope and rope | ({"mscale_all_dim": s.mscale} if s.mscale else {}),
        "n_shared_experts": e.shared_width // e.width, "first_k_dense_replace": len(dense),
    }  # fmt: skip
    if e.scores == "softmax":
        found["topk_method"] = "greedy" if e.groups == 1 else "group_limited_greedy"
    if c.names == GLM:
        found["mlp_layer_types"] = ["dense" if i in dense else "sparse" for i in range(c.n_layers)]
    return found


_V3 = {
    "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "rope_interleave": True,
}  # fmt: skip
_V2 = {name: value for name, value in _V3.items() if name != "num_experts_per_tok"} | {
    "max_position_embeddings": 2048, "moe_intermediate_size": 1407, "n_shared_experts": 2, "n_routed_experts": 64,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "first_k_dense_replace": 0, "norm_topk_prob": False,
}  # fmt: skip
_GLM = _V3 | {
    "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1536, "n_routed_experts": 64,
    "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "DeepSeek V3, R1", _V3, _read, _fields, _prepared, attention_bias=True)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, models="Kimi K2")
DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", "DeepSeek V2", _V2, _read, _fields, _prepared, attention_bias=True)
GLM4_MOE_LITE = Family("Glm4MoeLiteForCausalLM", "GLM 4.7 Flash", _GLM, _read, _fields, _prepared, attention_bias=True)
