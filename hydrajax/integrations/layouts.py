"""The places of a base's tensors in the parameters of other JAX programs (`hydrajax.integrations.axes`)."""

from __future__ import annotations

from hydrajax.integrations.axes import Place, Table

_ATTENTION, _MLP = "layers.{i}.attn.", "layers.{i}.mlp."


def _norms(**names: tuple[str, ...]) -> Table:
    """Return the places of norms, by the end of transformers' names without ``.weight``."""
    return {f"{name}.weight": tuple(Place("layers.{i}." + path) for path in paths) for name, paths in names.items()}


# google-tunix 0.1.7, `tunix.models`: Llama 3, Qwen 2 and 3 have projections of their own, Gemma fuses some.
TUNIX: Table = {
    "embed_tokens.weight": Place("embedder.input_embedding", "vd"),
    "lm_head.weight": Place("lm_head.w", "dv"),
    "norm.weight": (Place("final_norm.w"), Place("final_norm.scale")),
    "self_attn.q_proj.weight": (
        Place(f"{_ATTENTION}q_proj.w", "dnh"),
        Place(f"{_ATTENTION}q_einsum.w", "ndh"),
        Place(f"{_ATTENTION}qkv_einsum.w", "0ndh"),
    ),
    "self_attn.k_proj.weight": (
        Place(f"{_ATTENTION}k_proj.w", "dkh"),
        Place(f"{_ATTENTION}kv_einsum.w", "0kdh"),
        Place(f"{_ATTENTION}k_einsum.w", "kdh"),  # keys that are values too
        Place(f"{_ATTENTION}qkv_einsum.w", "1kdh"),
    ),
    "self_attn.v_proj.weight": (
        Place(f"{_ATTENTION}v_proj.w", "dkh"),
        Place(f"{_ATTENTION}kv_einsum.w", "1kdh"),
        Place(f"{_ATTENTION}qkv_einsum.w", "2kdh"),
    ),
    "self_attn.o_proj.weight": (
        Place(f"{_ATTENTION}o_proj.w", "nhd"),
        Place(f"{_ATTENTION}attn_vec_einsum.w", "nhd"),
    ),
    "self_attn.q_proj.bias": Place(f"{_ATTENTION}q_bias", ""),
    "self_attn.k_proj.bias": Place(f"{_ATTENTION}k_bias", ""),
    "self_attn.v_proj.bias": Place(f"{_ATTENTION}v_bias", ""),
    "self_attn.q_norm.weight": (Place(f"{_ATTENTION}q_norm.w"), Place(f"{_ATTENTION}_query_norm.scale")),
    "self_attn.k_norm.weight": (Place(f"{_ATTENTION}k_norm.w"), Place(f"{_ATTENTION}_key_norm.scale")),
    **{f"mlp.{name}_proj.weight": Place(f"{_MLP}{name}_proj.kernel", "df") for name in ("gate", "up")},
    "mlp.down_proj.weight": Place(f"{_MLP}down_proj.kernel", "fd"),
    "mlp.gate.weight": Place(f"{_MLP}router.kernel", "dx"),
    **{f"mlp.experts.e.{name}_proj.weight": Place(f"{_MLP}{name}_proj", "edf") for name in ("gate", "up")},
    "mlp.experts.e.down_proj.weight": Place(f"{_MLP}down_proj", "efd"),
    **_norms(
        input_layernorm=("input_layernorm.w", "pre_attention_norm.scale"),
        # Gemma's comes after attention, that of the others before the MLP.
        post_attention_layernorm=(
            "post_attention_layernorm.w",
            "post_attn_norm.scale",
            "post_attention_norm.scale",
            "pre_ffw_norm.scale",
        ),
        pre_feedforward_layernorm=("pre_ffw_norm.scale",),
        post_feedforward_layernorm=("post_ffw_norm.scale",),
    ),
}

LAYOUTS: dict[str, Table | None] = {"tunix": TUNIX, "hf": None}  # None: transformers' names and axes
