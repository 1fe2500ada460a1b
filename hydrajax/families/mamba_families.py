"""Granite 4 and Nemotron-H: the fields of their ``config.json`` that other families do not have."""

from __future__ import annotations

import dataclasses
from typing import Any

from hydrajax.families.config_fields import FULL, integer, layer_types, unsupported
from hydrajax.families.dense_families import granite, granite_fields
from hydrajax.families.expert_families import expert_fields, experts_of, grouped_experts, grouped_fields
from hydrajax.families.family import Family
from hydrajax.families.hybrid_families import LINEAR
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.recurrent_settings import Mamba2

OLDER = {"mamba": LINEAR, "attention": FULL}  # types of layers in older files
# Nemotron-H's pattern: a letter for each block, which is one of these.
BLOCKS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _refuse(raw: dict, **expected: Any) -> None:
    """Refuse fields with other values."""
    for name, value in expected.items():
        if raw.get(name) is not None and raw[name] != value:
            raise unsupported(name, raw[name], "none" if value is None else repr(value))


def _newer_types(raw: dict, name: str) -> dict:
    types = raw.get(name)
    return raw | {name: [OLDER.get(kind, kind) for kind in types]} if isinstance(types, list) else raw


def _number(value: Any) -> float:
    """Return a number that transformers 5 may write as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _mamba2(raw: dict, names: dict[str, str], step_limit: tuple[float, float], c: LlamaConfig) -> Mamba2:
    """Return the settings of Mamba-2 whose fields have these names."""
    sizes = {ours: integer(raw[theirs]) for ours, theirs in names.items()}
    return Mamba2(**(sizes | {"conv_bias": bool(sizes["conv_bias"])}), step_limit=step_limit, norm_eps=c.norm_eps)


def _mamba2_fields(c: LlamaConfig, names: dict[str, str]) -> tuple[Mamba2 | None, dict[str, Any]]:
    """Return the settings of Mamba-2, if there are layers of it, and their fields."""
    found = next((kind.recurrent for kind in c.kinds if isinstance(kind.recurrent, Mamba2)), None)
    return found, {theirs: getattr(found, ours) for ours, theirs in names.items()} if found else {}


# --- Granite 4 --------------------------------------------------------------------------------------------------------


_GRANITE_MAMBA = {
    "kernel": "mamba_d_conv",
    "groups": "mamba_n_groups",
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state_size": "mamba_d_state",
    "conv_bias": "mamba_conv_bias",
}


def _granite_types(raw: dict) -> dict:
    if "layers_block_type" in raw:
        raw = raw | {"layer_types": raw["layers_block_type"]}
    return _newer_types(raw, "layer_types")


def _granite_mamba(raw: dict, c: LlamaConfig) -> Mamba2:
    _refuse(raw, mamba_proj_bias=False, hidden_act="silu")
    heads, features = integer(raw["mamba_n_heads"]), integer(raw["mamba_expand"]) * c.width
    head_dim = features // max(heads, 1) if raw["mamba_d_head"] == "auto" else integer(raw["mamba_d_head"])
    if heads * head_dim != features:
        raise unsupported("mamba_d_head", raw["mamba_d_head"], "mamba_expand * hidden_size / mamba_n_heads")
    least, most = map(_number, raw.get("time_step_limit") or Mamba2.step_limit)
    return _mamba2(raw | {"mamba_d_head": head_dim}, _GRANITE_MAMBA, (least, most), c)


def _granite(raw: dict, c: LlamaConfig) -> LlamaConfig:
    types = layer_types(raw, c.n_layers, lambda i: LINEAR, (LINEAR, FULL))
    c = granite(raw, c).replace(mlp_width=integer(raw["shared_intermediate_size"]), names="granitemoehybrid")
    if raw.get("position_embedding_type") != "rope":
        c = c.replace(rope_theta=None, rope_scaling=None)
    experts = None
    if integer(raw.get("num_local_experts") or 0):
        experts = experts_of(raw, "num_local_experts", "intermediate_size", normalized=True, shared_width=c.mlp_width)
    attention = LayerKind(None, c.rope_theta, c.rope_scaling, experts)
    mamba = _granite_mamba(raw, c) if LINEAR in types else None
    by_type = {FULL: attention, LINEAR: LayerKind(None, None, None, experts, recurrent=mamba)}
    return c.with_kinds([by_type[kind] for kind in types])


def _granite_fields(c: LlamaConfig) -> dict[str, Any]:
    experts, (mamba, fields) = c.any_experts, _mamba2_fields(c, _GRANITE_MAMBA)
    fields |= granite_fields(c) | {
        "layer_types": ["mamba" if kind.recurrent else "attention" for kind in c.kinds],
        "position_embedding_type": "rope" if any(kind.rope_theta for kind in c.kinds) else "nope",
        "shared_intermediate_size": c.mlp_width,
        "num_local_experts": 0,
    }
    if experts:
        fields |= expert_fields(c, "num_local_experts", "intermediate_size")
    if not mamba:
        return fields | {"mamba_n_heads": 1}  # which divides any width
    if mamba.step_limit != Mamba2.step_limit:
        fields["time_step_limit"] = list(mamba.step_limit)
    return fields | {"mamba_expand": mamba.heads * mamba.head_dim // c.width}


# --- Nemotron-H -------------------------------------------------------------------------------------------------------


_NEMOTRON_MAMBA = {
    "kernel": "conv_kernel",
    "groups": "n_groups",
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_size": "ssm_state_size",
    "conv_bias": "use_conv_bias",
}


def _nemotron_blocks(raw: dict) -> dict:
    """Return the fields by LLaMA's names, with a list of blocks in place of a pattern."""
    types = raw.get("layers_block_type") or raw.get("layer_types")
    if types is None:
        types = [BLOCKS.get(block, block) for block in raw.get("hybrid_override_pattern") or "ME*-"]
    raw = _newer_types(raw | {"layer_types": types}, "layer_types")
    return raw | {
        "num_hidden_layers": len(types),
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "hidden_act": None,  # mlp_hidden_act counts
    }


def _nemotron(raw: dict, c: LlamaConfig) -> LlamaConfig:
    _refuse(
        raw, use_bias=False, mlp_hidden_act="relu2", mamba_hidden_act="silu", moe_latent_size=None, sliding_window=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    blocks = layer_types(raw, c.n_layers, lambda i: "", tuple(BLOCKS.values()))
    mamba = experts = None
    if LINEAR in blocks:
        mamba = _mamba2(raw, _NEMOTRON_MAMBA, (_number(raw["time_step_min"]), float("inf")), c)
    if "moe" in blocks:
        experts = grouped_experts(raw, integer(raw["moe_shared_expert_intermediate_size"]))
    kinds: list[LayerKind] = []
    for block in blocks:
        if block in (LINEAR, FULL):
            kinds.append(LayerKind(None, None, None, recurrent=mamba if block == LINEAR else None, mlp=False))
        elif not kinds or kinds[-1].mlp:
            raise unsupported("layers_block_type", blocks, "a block of Mamba or attention before each MLP")
        else:
            kinds[-1] = dataclasses.replace(kinds[-1], mlp=True, experts=experts if block == "moe" else None)
    c = c.replace(n_layers=len(kinds), rope_theta=None, rope_scaling=None, activation="relu2", names="nemotron_h")
    return c.with_kinds(kinds)


def _nemotron_fields(c: LlamaConfig) -> dict[str, Any]:
    experts, (mamba, fields), pattern = c.any_experts, _mamba2_fields(c, _NEMOTRON_MAMBA), ""
    for kind in c.kinds:
        pattern += ("M" if kind.recurrent else "*") + ("E" if kind.experts else "-" if kind.mlp else "")
    fields |= {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "layer_norm_epsilon": c.norm_eps,
        "mlp_hidden_act": c.activation,
    }
    if mamba:
        fields["time_step_min"] = mamba.step_limit[0]
    if experts:
        fields |= grouped_fields(c) | {"moe_shared_expert_intermediate_size": experts.shared_width}
    return fields


_GRANITE = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True,
}  # fmt: skip
_NEMOTRON = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
    "conv_kernel": 4, "time_step_min": 0.001, "use_conv_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
GRANITE = Family("GraniteMoeHybridForCausalLM", "Granite 4", _GRANITE, _granite, _granite_fields, _granite_types)
NEMOTRON = Family(
    "NemotronHForCausalLM", "Nemotron-H, Nemotron Nano 2, 3", _NEMOTRON, _nemotron, _nemotron_fields, _nemotron_blocks
)
