"""Fields of ``config.json`` that several families share: numbers, rotary embeddings, windows and kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hydrajax.errors import HydrajaxError, one_of
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.rope_scaling import ROPE_KINDS, RopeScaling

SLIDING, FULL = "sliding_attention", "full_attention"
# A slip in the number of layers must not take all memory where every layer is listed.
MOST_LAYERS = 4096
# Values of ``hidden_act`` and ours.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def unsupported(name: str, found: Any, expected: str) -> HydrajaxError:
    """Return the error for a field whose value is not implemented; the caller adds the file."""
    found = repr(found)
    return HydrajaxError(f"{name}: got {found if len(found) <= 200 else found[:200] + '...'}, expected {expected}")


def integer(value: Any) -> int:
    """Return a number of ``config.json``; a larger one would overflow or take all memory."""
    found = int(value)
    if abs(found) >= 2**31:
        raise ValueError("an integer beyond 32 bits")
    return found


def optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def activation(raw: dict, name: str = "hidden_act") -> str:
    """Return our name of the MLP's activation."""
    found = raw.get(name) or "silu"
    if not isinstance(found, str) or found not in ACTIVATIONS:
        raise unsupported(name, found, "'silu' or 'gelu_pytorch_tanh'")
    return ACTIVATIONS[found]


def hidden_activation(raw: dict) -> dict:
    """Return the fields with the activation under the name that most families have."""
    return raw | {"hidden_act": raw["hidden_activation"]}


def hidden_act(c: LlamaConfig) -> str:
    """Return transformers' name of the MLP's activation."""
    return next((name for name, ours in ACTIVATIONS.items() if ours == c.activation), c.activation)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def rope_scaling(scaling: dict, raw: dict) -> RopeScaling | None:
    """Return the meaning of ``rope_scaling``, or of ``rope_parameters``, in a ``config.json``."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(scaling["factor"]))
    if kind == "proportional":
        factor, part = (float(scaling.get(name, 1.0)) for name in ("factor", "partial_rotary_factor"))
        return RopeScaling(kind, factor, part=part)
    if kind not in ROPE_KINDS:
        raise unsupported("rope scaling", kind, one_of(ROPE_KINDS))
    context = integer(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    if kind == "llama3":
        return RopeScaling(
            kind, *(float(scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")), context
        )
    if context < 1:
        raise unsupported("original_max_position_embeddings", context, "1 or more")
    factor = scaling.get("factor") if kind == "longrope" else scaling["factor"]
    factor = integer(raw["max_position_embeddings"]) / context if factor is None else float(factor)
    if not factor > 0:
        raise HydrajaxError(f"rope scaling: factor: got {factor}, expected a positive number")
    attention = scaling.get("attention_factor")
    if kind == "longrope":
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0
        short, long = (tuple(map(float, scaling[f"{name}_factor"])) for name in ("short", "long"))
        factor = integer(raw["max_position_embeddings"]) / context
        return RopeScaling(
            kind, factor, original_max_position=context, attention_factor=float(attention), short_factors=short,
            long_factors=long,
        )  # fmt: skip
    if attention is None:
        attention = _yarn_attention(factor, scaling.get("mscale"), scaling.get("mscale_all_dim"))
    return RopeScaling(
        kind, factor, original_max_position=context, attention_factor=float(attention),
        beta_fast=float(scaling.get("beta_fast") or 32), beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
    )  # fmt: skip


def _yarn_attention(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's factor of cosines and sines: 0.1 ln(factor) + 1, or the ratio of two such (DeepSeek)."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1)


def rope_fields(scaling: RopeScaling | None) -> dict | None:
    """Return ``rope_scaling`` of a ``config.json``, the inverse of `rope_scaling`."""
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind != "longrope" and (scaling.kind, scaling.factor) != ("proportional", 1.0):
        found["factor"] = scaling.factor
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    elif scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    elif scaling.kind == "longrope":
        found |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.kind in ("yarn", "longrope"):
        found["attention_factor"] = scaling.attention_factor
    if scaling.kind == "proportional":
        found["partial_rotary_factor"] = scaling.part
    elif scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original_max_position
    return found


def default_rope(raw: dict, rope: dict[str, Any]) -> dict:
    """Return the fields with this rotary embedding, if they have none."""
    return raw if raw.get("rope_parameters") or raw.get("rope_scaling") else raw | {"rope_parameters": rope}


def rope_parameters(theta: float | None, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return ``rope_parameters`` of a ``config.json`` for one type of layer."""
    return {"rope_theta": theta or LlamaConfig.rope_theta} | (rope_fields(scaling) or {"rope_type": "default"})


# --- kinds of layers --------------------------------------------------------------------------------------------------


def layer_types(
    raw: dict, n_layers: int, default: Callable[[int], str], known: Sequence[str] = (FULL, SLIDING)
) -> list[str]:
    """Return the type of each layer: of ``layer_types``, or ``default(i)``."""
    if n_layers > MOST_LAYERS:
        raise unsupported("num_hidden_layers", n_layers, f"at most {MOST_LAYERS} layers of several kinds")
    types = raw.get("layer_types")
    if types is None:
        return [default(i) for i in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
        raise unsupported("layer_types", types, f"{' or '.join(known)} for each of {n_layers} layers")
    return types


def window_of(raw: dict, max_positions: int) -> int | None:
    """Return ``sliding_window``; None if it is missing, or not shorter than the context."""
    window = raw.get("sliding_window")
    return None if window is None or (window := integer(window)) >= max_positions else window


def with_windows(
    c: LlamaConfig,
    types: Sequence[str],
    window: int | None,
    rope: tuple[float | None, RopeScaling | None] | None = None,
) -> LlamaConfig:
    """Return the configuration with a window in the layers of type `SLIDING`.

    ``rope`` is the base and the scaling of their rotary embedding, by default the configuration's.
    """
    own = (c.rope_theta, c.rope_scaling)
    by_type = {FULL: LayerKind(None, *own), SLIDING: LayerKind(window, *(rope or own))}
    return c.with_kinds([by_type[kind] for kind in types])


def types_of(c: LlamaConfig) -> list[str]:
    """Return ``layer_types`` of a configuration."""
    return [FULL if kind.sliding_window is None else SLIDING for kind in c.kinds]


def window_field(c: LlamaConfig) -> int | None:
    """Return ``sliding_window`` of a configuration."""
    return next((kind.sliding_window for kind in c.layer_kinds or (c,) if kind.sliding_window), None)
