"""Muse Glimmer: the fields of its ``config.json`` that other families do not have."""

from __future__ import annotations

import math
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import (
    FULL,
    SLIDING,
    hidden_act,
    hidden_activation,
    layer_types,
    rope_fields,
    types_of,
    unsupported,
    window_field,
    window_of,
)
from hydrajax.families.family import Family
from hydrajax.models.llama_config import LayerKind, LlamaConfig

NAMES = "muse_glimmer"


def _muse_glimmer(raw: dict, c: LlamaConfig) -> LlamaConfig:
    def every_fourth(i: int) -> bool:  # counted from the last layer
        return (c.n_layers - 1 - i) % 4 == 0

    types = layer_types(raw, c.n_layers, lambda i: FULL if every_fourth(i) else SLIDING)
    thetas = raw.get("layer_rope_theta")
    if thetas is None:
        thetas = [0 if every_fourth(i) else c.rope_theta for i in range(c.n_layers)]
    numbers = isinstance(thetas, list) and all(isinstance(theta, int | float) for theta in thetas)
    if not numbers or len(thetas) < c.n_layers:
        raise unsupported("layer_rope_theta", thetas, f"a number for each of {c.n_layers} layers")
    multiplier, window = float(raw["output_multiplier"]), window_of(raw, c.max_positions)
    if not multiplier > 0:
        raise unsupported("output_multiplier", multiplier, "a positive number")
    c = c.replace(
        norms="both",
        norm_offset=True,
        final_norm_offset=False,
        norm_scales="layers",
        out_norm_eps=float(raw["post_norm_eps"]),
        embedding_norm=True,
        qk_norm=True,
        attention_gate=True,
        attention_scale=float(raw["qk_scale_factor"]) * c.head_dim**-0.5,
        logits_divisor=1 / multiplier,
        logits_softcap=float(raw["final_logit_softcapping"]),
        names=NAMES,
    )
    # As in transformers, a theta that is not 0 means the embedding of the whole model.
    rope = c.rope_theta, c.rope_scaling
    return c.with_kinds(
        [
            LayerKind(window if kind == SLIDING else None, *(rope if theta else (None, None)))
            for kind, theta in zip(types, thetas, strict=False)
        ]
    )


def _muse_glimmer_fields(c: LlamaConfig) -> dict[str, Any]:
    if c.names != NAMES or c.attention_scale is None:
        raise HydrajaxError(f"names: got '{c.names}', expected those of this family")
    usual = c.head_dim**-0.5
    factor = c.attention_scale / usual
    near = factor, math.nextafter(factor, 0), math.nextafter(factor, math.inf)
    return {
        "hidden_activation": hidden_act(c),
        "post_norm_eps": c.out_norm_eps,
        "qk_scale_factor": next((x for x in near if x * usual == c.attention_scale), factor),
        "output_multiplier": 1 / c.logits_divisor,
        "final_logit_softcapping": c.logits_softcap,
        "sliding_window": window_field(c) or c.max_positions,
        "layer_types": types_of(c),
        "rope_scaling": rope_fields(c.rope_scaling),
        "layer_rope_theta": [kind.rope_theta or 0 for kind in c.kinds],
    }


_TEXT = {
    "num_key_value_heads": 2, "head_dim": 128, "hidden_activation": "silu", "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "sliding_window": 2048, "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0,
}  # fmt: skip
TEXT = Family(
    "MuseGlimmerTextModel", "Muse Glimmer, text", _TEXT, _muse_glimmer, _muse_glimmer_fields, hidden_activation
)
