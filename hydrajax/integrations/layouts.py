"""The places of a base's tensors in the parameters of other JAX programs (`hydrajax.integrations.axes`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.integrations.axes import Place, Table
from hydrajax.integrations.configs import MaxText, program_of
from hydrajax.models.llama_config import LlamaConfig


def _norms(start: str, **names: tuple[str, ...]) -> Table:
    """Return the places of norms, by the end of transformers' names without ``.weight``."""
    return {f"{name}.weight": tuple(Place(start + path) for path in paths) for name, paths in names.items()}


def _tunix(layer: str = "layers.{i}.") -> Table:
    """Return the table of google-tunix 0.1.7, `tunix.models`: Gemma fuses some projections, the others do not.

    Args:
        layer: start of a layer's paths.
    """
    return {
        "embed_tokens.weight": Place("embedder.input_embedding", "vd"),
        "lm_head.weight": Place("lm_head.w", "dv"),
        "norm.weight": (Place("final_norm.w"), Place("final_norm.scale")),
        "self_attn.q_proj.weight": (
            Place(f"{layer}attn.q_proj.w", "dnh"),
            Place(f"{layer}attn.q_einsum.w", "ndh"),
            Place(f"{layer}attn.qkv_einsum.w", "0ndh"),
        ),
        "self_attn.k_proj.weight": (
            Place(f"{layer}attn.k_proj.w", "dkh"),
            Place(f"{layer}attn.kv_einsum.w", "0kdh"),
            Place(f"{layer}attn.k_einsum.w", "kdh"),  # keys that are values too
            Place(f"{layer}attn.qkv_einsum.w", "1kdh"),
        ),
        "self_attn.v_proj.weight": (
            Place(f"{layer}attn.v_proj.w", "dkh"),
            Place(f"{layer}attn.kv_einsum.w", "1kdh"),
            Place(f"{layer}attn.qkv_einsum.w", "2kdh"),
        ),
        "self_attn.o_proj.weight": (
            Place(f"{layer}attn.o_proj.w", "nhd"),
            Place(f"{layer}attn.attn_vec_einsum.w", "nhd"),
        ),
        "self_attn.q_proj.bias": Place(f"{layer}attn.q_bias", ""),
        "self_attn.k_proj.bias": Place(f"{layer}attn.k_bias", ""),
        "self_attn.v_proj.bias": Place(f"{layer}attn.v_bias", ""),
        "embed_tokens_per_layer.weight": [
            Place(f"embedder.per_layer_{name}", "vlp") for name in ("input_embedding", "embeddings")
        ],
        "per_layer_model_projection.weight": Place("embedder.per_layer_model_projection.w", "dlp"),
        "per_layer_projection_norm.weight": Place("embedder.per_layer_projection_norm.scale"),
        "per_layer_input_gate.weight": Place(f"{layer}per_layer_input_gate.w", "dp"),
        "per_layer_projection.weight": Place(f"{layer}per_layer_projection.w", "pd"),
        "layer_scalar": Place(f"{layer}skip_scale"),
        **{f"mlp.{name}_proj.weight": Place(f"{layer}mlp.{name}_proj.kernel", "df") for name in ("gate", "up")},
        "mlp.down_proj.weight": Place(f"{layer}mlp.down_proj.kernel", "fd"),
        "mlp.gate.weight": Place(f"{layer}mlp.router.kernel", "dx"),
        **{f"mlp.experts.e.{name}_proj.weight": Place(f"{layer}mlp.{name}_proj", "edf") for name in ("gate", "up")},
        "mlp.experts.e.down_proj.weight": Place(f"{layer}mlp.down_proj", "efd"),
        **_norms(
            layer,
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
            post_per_layer_input_norm=("post_per_layer_input_norm.scale",),
            **{
                f"self_attn.{part[0]}_norm": tuple(f"attn.{name}" for name in (f"{part[0]}_norm.w", f"_{part}", part))
                for part in ("query_norm.scale", "key_norm.scale")
            },
        ),
    }


def _gemma(c: LlamaConfig, given: Any) -> Table:
    """Return the table of google-deepmind's gemma 4.0.1, `gemma.gm.nn`, which has a fused gate in one of two orders."""
    mlp, transposed = "layer_{i}.mlp.", getattr(given, "transpose_gating_einsum", True if c.names == "gemma4" else None)
    orders = [order for order, is_it in (("fd", True), ("df", False)) if transposed in (None, is_it)]
    return _tunix("layer_{i}.") | {
        "mlp.gate_proj.weight": [Place(f"{mlp}gating_einsum", f"0{order}") for order in orders],
        "mlp.up_proj.weight": [Place(f"{mlp}gating_einsum", f"1{order}") for order in orders],
        "mlp.down_proj.weight": Place(f"{mlp}linear", "fd"),
    }


# MaxText 0.2.5, `maxtext.models`: a layer's arrays; ``*`` is the kind of a layer of Gemma 2.
_MAXTEXT = {
    "self_attn.q_proj.weight": ("self_attention*.query.kernel", "dnh"),
    "self_attn.k_proj.weight": ("self_attention*.key.kernel", "dkh"),
    "self_attn.v_proj.weight": ("self_attention*.value.kernel", "dkh"),
    "self_attn.o_proj.weight": ("self_attention*.out.kernel", "nhd"),
    "self_attn.q_proj.bias": ("self_attention*.query.bias", "nh"),
    "self_attn.k_proj.bias": ("self_attention*.key.bias", "kh"),
    "self_attn.v_proj.bias": ("self_attention*.value.bias", "kh"),
    "self_attn.q_norm.weight": ("self_attention*.query_norm.scale", "d"),
    "self_attn.k_norm.weight": ("self_attention*.key_norm.scale", "d"),
    "mlp.gate_proj.weight": ("mlp*.wi_0.kernel", "df"),
    "mlp.up_proj.weight": ("mlp*.wi_1.kernel", "df"),
    "mlp.down_proj.weight": ("mlp*.wo.kernel", "fd"),
    "mlp.gate.weight": ("moe_block.gate.kernel", "dx"),
    "mlp.experts.e.gate_proj.weight": ("moe_block.wi_0", "edf"),
    "mlp.experts.e.up_proj.weight": ("moe_block.wi_1", "edf"),
    "mlp.experts.e.down_proj.weight": ("moe_block.wo", "efd"),
}
# Its norms by `LlamaConfig.norms`.
_MAXTEXT_NORMS = {
    "before": {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
    },
    "both": {
        "input_layernorm": "pre_self_attention_norm*",
        "post_attention_layernorm": "post_self_attention_norm*",
        "pre_feedforward_layernorm": "pre_ffw_norm*",
        "post_feedforward_layernorm": "post_ffw_norm*",
    },
}


def _maxtext(c: LlamaConfig, given: Any) -> Table:
    """Return MaxText's table, with scanned and unscanned layers.

    With a configuration of MaxText, which means its arrays as they are, nothing is scaled or shifted. With another
    one, its conversion is undone: of queries in blocks that do not scale the scores, Gemma's embedding, and norms.
    """
    own = MaxText(given) if program_of(given) == "maxtext" else None
    interleaved = own.interleaved if own else c.rope_scaling is not None and c.rope_scaling.kind == "llama3"
    folded = not (own or c.qk_norm or c.qkv_bias)
    query_scale = 1 / (c.attention_scale or c.head_dim**-0.5) if folded else 1.0
    offset, at = -float(c.norm_offset), own.param_scan_axis if own else 1
    norms = {f"{end}.weight": (f"{path}.scale", "d") for end, path in _MAXTEXT_NORMS.get(c.norms, {}).items()}
    table: dict[str, Any] = {
        "embed_tokens.weight": Place("token_embedder.embedding", "vd", 1 / c.embedding_scale),
        "lm_head.weight": Place("decoder.logits_dense.kernel", "dv"),
        "norm.weight": Place("decoder.decoder_norm.scale", "d", 1.0, offset),
    }
    for end, (path, axes) in (_MAXTEXT | norms).items():
        if interleaved and ("q_proj" in end or "k_proj" in end):
            axes = axes.replace("h", "H")
        scanned = axes[:at] + "l" + axes[at:] if at <= len(axes) else f"l{axes}"
        numbers = query_scale if "q_proj" in end else 1.0, offset if path.endswith("scale") else 0.0
        table[end] = [
            Place(start + path.replace("*", kind), scanned if several else axes, *numbers, layers)
            for start, kind, layers, several in _blocks(c)
        ]
    return table


def _blocks(c: LlamaConfig) -> list[tuple[str, str, range | None, bool]]:
    """Return the modules that have layers: start of the path, kind of layer, the layers, and whether they are an axis.

    Gemma 2 has pairs of layers. Gemma 3 scans blocks of six layers, and has the others apart.
    """
    n, plain = c.n_layers, ("decoder.layers_{i}.", "", None, False)
    if c.norms != "both":
        return [("decoder.layers.", "", None, True), plain]
    if not c.qk_norm:
        kinds = "_local", "_global"
        pairs = [(f"decoder.layers_{i // 2}.", kinds[i % 2], range(i, i + 1), False) for i in range(n)]
        return [("decoder.layers.", kind, range(first, n, 2), True) for first, kind in enumerate(kinds)] + pairs
    whole = n - n % 6
    return [
        *((f"decoder.layers.layers_{i}.", "", range(i, whole, 6), True) for i in range(6)),
        *((f"decoder.layers_remainder.layers_{i % 6}.", "", range(i, i + 1), False) for i in range(whole, n)),
        plain,
    ]


LAYOUTS: dict[str, Callable[[LlamaConfig, Any], Table | None]] = {
    "tunix": lambda c, given: _tunix(),
    "gemma": _gemma,
    "maxtext": _maxtext,
    "hf": lambda c, given: None,  # transformers' names and axes
}


def table_of(layout: str | Table, c: LlamaConfig, given: Any = None) -> Table | None:
    """Return the table of a layout.

    Args:
        layout: its name, or a table.
        c: configuration of the base.
        given: the other program's, from which ``c`` was read; None for none.
    """
    if not isinstance(layout, str):
        return layout
    if layout not in LAYOUTS:
        raise not_allowed("layout", layout, LAYOUTS)
    if program_of(given) == "maxtext" and layout != "maxtext":
        raise HydrajaxError(f"layout: got '{layout}' for a configuration of MaxText, expected 'maxtext'")
    return LAYOUTS[layout](c, given)
