"""What the families of models have in common: how ``config.json`` maps to `LlamaConfig` and back, and the key map.

A family differs from LLaMA in a few places only. Those are the fields of `Family`, and each family's own file fills
them in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.models.layout import Entry, Layout, Path, Shape, same, transposed
from hydrajax.models.llama_config import LlamaConfig, RopeScaling


@dataclass(frozen=True)
class Family:
    """One family of models.

    model_type:     its name in ``config.json``.
    architecture:   its class in transformers.
    models:         well-known models of the family, for messages.
    defaults:       what transformers takes for fields that a file leaves out, where that is not LLaMA's default.
    qkv_bias:       whether the projections to queries, keys and values have biases.
    qk_norm:        whether each head's queries and keys are normed.
    extra_tensors:  ``(path, prefix, config) -> Layout``: tensors of a decoder layer that LLaMA's does not have.
    window:         ``raw -> int or None``: the sliding window that ``config.json`` sets. None for a family without.
    full_layers:    ``(raw, n_layers) -> int``: in how many layers a token sees all others nevertheless. It is asked
                    only of files that do not list ``layer_types``.
    window_fields:  ``config -> dict``: the fields of ``config.json`` from which the two above come.
    """

    model_type: str
    architecture: str
    models: str
    defaults: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    extra_tensors: Callable[[Path, str, LlamaConfig], Layout] = lambda path, prefix, config: []
    window: Callable[[dict], int | None] | None = None
    full_layers: Callable[[dict, int], int] = lambda raw, n_layers: 0
    window_fields: Callable[[LlamaConfig], dict] = lambda config: {}

    def includes(self, c: LlamaConfig) -> bool:
        """Whether a model of this configuration can be written as one of the family."""
        fits = self.window is not None or c.sliding_window is None
        return fits and (c.qkv_bias, c.qk_norm) == (self.qkv_bias, self.qk_norm)

    def read(self, raw: dict, what: str) -> LlamaConfig:
        """Translate ``config.json``. Raises `HydrajaxError`, beginning with ``what``, for what is not implemented."""
        raw = self.defaults | raw
        _check_supported(raw, what)
        try:
            return self._translate(raw, what)
        except KeyError as missing:
            raise HydrajaxError(f"{what}: field {missing} is missing") from None
        except HydrajaxError as error:  # `LlamaConfig` does not know whose numbers they are
            line = str(error)
            raise HydrajaxError(line if line.startswith(what) else f"{what}: {line}") from None
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise HydrajaxError(f"{what}: a field has the wrong type: {error}") from None

    def _translate(self, raw: dict, what: str) -> LlamaConfig:
        n_heads = integer(raw["num_attention_heads"])
        if n_heads < 1:
            raise unsupported(what, "num_attention_heads", n_heads, "1 or more")
        width, n_layers = integer(raw["hidden_size"]), integer(raw["num_hidden_layers"])
        rope = raw.get("rope_parameters") or {}
        # The first LLaMA conversions call it max_sequence_length.
        max_positions = integer(raw.get("max_position_embeddings") or raw.get("max_sequence_length") or 2048)
        return LlamaConfig(
            vocab_size=integer(raw["vocab_size"]),
            width=width,
            mlp_width=integer(raw["intermediate_size"]),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=integer(raw.get("num_key_value_heads") or n_heads),
            head_dim=integer(raw.get("head_dim") or width // n_heads),
            max_positions=max_positions,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, raw, what),
            tied_lm_head=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            sliding_window=self._window(raw, n_layers, max_positions, what),
        )

    def _window(self, raw: dict, n_layers: int, max_positions: int, what: str) -> int | None:
        """The window if every layer has it, and None if no layer has one that is shorter than the context."""
        window = None if self.window is None else self.window(raw)
        if window is None or (window := integer(window)) >= max_positions:
            return None
        types = raw.get("layer_types")  # newer files list them, and transformers then looks at nothing else
        if types is None:
            n_full = self.full_layers(raw, n_layers)
            n_sliding = n_layers - n_full
        else:
            n_full, n_sliding = (list(types).count(f"{name}_attention") for name in ("full", "sliding"))
        if n_full == n_layers:
            return None
        if n_sliding != n_layers:
            raise HydrajaxError(
                f"{what}: layer_types mixes layers with and without a sliding window (or lists others), "
                "supported is one kind for all layers"
            )
        return window

    def write(self, c: LlamaConfig) -> dict:
        """The fields of ``config.json``, as transformers 4 and 5 both read them."""
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": c.vocab_size,
            "hidden_size": c.width,
            "intermediate_size": c.mlp_width,
            "num_hidden_layers": c.n_layers,
            "num_attention_heads": c.n_heads,
            "num_key_value_heads": c.n_kv_heads,
            "head_dim": c.head_dim,
            "max_position_embeddings": c.max_positions,
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": c.tied_lm_head,
        }
        if c.rope_scaling is not None:
            scaling = config["rope_scaling"] = {"rope_type": c.rope_scaling.kind, "factor": c.rope_scaling.factor}
            if c.rope_scaling.kind == "llama3":
                scaling["low_freq_factor"] = c.rope_scaling.low_freq_factor
                scaling["high_freq_factor"] = c.rope_scaling.high_freq_factor
                scaling["original_max_position_embeddings"] = c.rope_scaling.original_max_position
        return config | self.window_fields(c)

    def layout(self, c: LlamaConfig) -> Layout:
        """The key map of the whole base, by transformers' names."""
        layout = [same(("embedding",), "model.embed_tokens.weight", c.vocab_size, c.width)]
        for i in range(c.n_layers):
            path, prefix = (f"layers_{i}",), f"model.layers.{i}."
            layout += decoder_layer(path, prefix, c) + self.extra_tensors(path, prefix, c)
        layout.append(same(("norm", "scale"), "model.norm.weight", c.width))
        if not c.tied_lm_head:
            layout.append(transposed(("lm_head",), "lm_head.weight", c.vocab_size, c.width))
        return layout


def unsupported(what: str, name: str, found: Any, allowed: str) -> HydrajaxError:
    """The error that a field of ``config.json`` says what is not implemented."""
    return HydrajaxError(f"{what}: {name} is {found!r}, supported is {allowed}")


def decoder_layer(path: Path, prefix: str, c: LlamaConfig, attends_from: int | None = None) -> Layout:
    """The key map of one LLaMA decoder layer.

    path: where the layer lies in our parameters. prefix: how the names of its tensors begin. attends_from: the width of
    what its attention reads where that is not the norm of its input, which it then does not have. See
    `hydrajax.models.layers.DecoderLayer`, also for why our parameters fuse matrices.
    """
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    norm = same((*path, "attention_norm", "scale"), f"{prefix}input_layernorm.weight", c.width)
    return [
        *([norm] if attends_from is None else []),
        by_kv_head((*path, "qkv"), attention, "weight", c, (attends_from or c.width,)),
        transposed((*path, "out"), f"{attention}o_proj.weight", c.width, c.n_heads * c.head_dim),
        same((*path, "mlp_norm", "scale"), f"{prefix}post_attention_layernorm.weight", c.width),
        Entry(
            ((*path, "gate_up"),),
            {f"{mlp}{part}_proj.weight": (c.mlp_width, c.width) for part in ("gate", "up")},
            lambda gate, up: (np.stack([gate, up]).transpose(2, 0, 1),),
            lambda both: (both[:, 0].T, both[:, 1].T),
        ),
        transposed((*path, "down"), f"{mlp}down_proj.weight", c.width, c.mlp_width),
    ]


def by_kv_head(path: Path, prefix: str, kind: str, c: LlamaConfig, inputs: Shape) -> Entry:
    """The projections to queries, keys and values as one parameter.

    Ours is ``[*inputs, kv head, its queries, then its key and its value, feature]``. Theirs are three tensors whose
    rows are (kv head, query in its group, feature), followed by the inputs. kind: ``weight``, or ``bias`` (no inputs).
    """
    rows = {"q": c.n_heads * c.head_dim, "k": c.n_kv_heads * c.head_dim, "v": c.n_kv_heads * c.head_dim}

    def join(*parts):
        by_head = [part.reshape(c.n_kv_heads, -1, c.head_dim, *inputs) for part in parts]
        fused = np.concatenate(by_head, axis=1)
        return (np.moveaxis(fused, -1, 0) if inputs else fused,)

    def split(fused):
        fused = np.moveaxis(fused, 0, -1) if inputs else fused
        return tuple(part.reshape(-1, *inputs) for part in (fused[:, :-2], fused[:, -2], fused[:, -1]))

    theirs = {f"{prefix}{part}_proj.{kind}": (size, *inputs) for part, size in rows.items()}
    return Entry((path,), theirs, join, split)


def _check_supported(raw: dict, what: str) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise unsupported(what, "hidden_act", raw["hidden_act"], "'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise unsupported(what, name, raw[name], "false")
    for name in ("quantization_config", "rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, dict):
            raise unsupported(what, name, raw[name], "an object")
    if raw.get("quantization_config"):
        found = raw["quantization_config"].get("quant_method")
        raise unsupported(what, "quantization_config", found, "none (float weights)")


def integer(value: Any) -> int:
    """A number of ``config.json``; one that no model has would take all memory or overflow."""
    found = int(value)
    if abs(found) >= 2**31:
        raise ValueError("an integer beyond 32 bits")
    return found


def _rope_scaling(scaling: dict, raw: dict, what: str) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise HydrajaxError(f"{what}: rope scaling type is '{kind}', supported are 'linear' and 'llama3'")
    if kind == "linear":
        return RopeScaling("linear", float(scaling["factor"]))
    return RopeScaling(
        "llama3",
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        integer(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )
