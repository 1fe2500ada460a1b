"""The files of EAGLE drafts: as their authors released them (SafeAILab/EAGLE), and as vLLM names them.

A released directory holds ``config.json``, which is that of a LLaMA of one layer, and ``pytorch_model.bin`` or
``model.safetensors``. EAGLE-1 (and 2, whose weights are of the same kind) names its tensors ``fc.*`` and
``layers.0.*``, the first layer being without ``input_layernorm``. EAGLE-3 names them ``fc.weight``, ``midlayer.*``,
``norm.weight`` and ``lm_head.weight``, with ``d2t`` and ``t2d`` where it knows some tokens only. The files may hold a
copy of the base's embedding, which is not read and not written.

vLLM reads these, and the same tensors with a ``config.json`` of its own: ``model_type`` is ``eagle``, and ``model``
holds the layer's fields, of which those beside it overrule some (``vllm/transformers_utils/configs/eagle.py``). To it
``midlayer.`` and ``layers.0.`` are one name. For speculators see `hydrajax.formats.speculators`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hydrajax.drafters.eagle import Eagle, FeatureDrafter
from hydrajax.drafters.eagle3 import Eagle3, reads_of
from hydrajax.drafters.lm_head import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.formats.eagle_layouts import (
    CONFIG,
    EMBEDDING,
    IGNORED,
    LAYERS,
    FeatureFormat,
    check_embedding,
    eagle_3_layout,
    eagle_3_of,
    eagle_layout,
    expect,
    flag,
    layer_fields,
    layer_of,
    layers_read,
    plain,
    reads_from,
    token_tensors,
)
from hydrajax.formats.interface import About, Files, cannot_write
from hydrajax.formats.speculators import SPECULATORS
from hydrajax.formats.stacks import MOST, check_sizes
from hydrajax.models.config import LlamaConfig, RopeScaling

NESTED = "eagle"  # the model_type of vLLM's own config.json
LM_HEAD = "lm_head.weight"


class EagleFormat(FeatureFormat):
    """EAGLE-1 and 2."""

    name = "eagle"
    known_by = "released EAGLE (fc. and layers.0.)"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, the official EAGLE code since 2025 (`use_eagle3=False`; no "
        "llama3 RoPE scaling), and versions of vLLM with the `eagle` method, drafts without a bias: "
        '`--speculative-config \'{"method": "eagle", "model": "THIS", "num_speculative_tokens": 5}\'`.'
    )
    ignored = IGNORED + r"|lm_head\.weight"  # vLLM's own files have a copy of the base's lm head, too
    layer = "layers.0."

    def recognises(self, config, names):
        return any(name.startswith(self.layer) for name in names) and f"{self.layer}hidden_norm.weight" not in names

    def drafter(self, config, files, base):
        # What it is where nothing is said differs between the official code and vLLM, and so does its name.
        flat, nested = flattened(config), config.get("model_type") == NESTED
        name = "eagle_fc_bias" if nested and "eagle_fc_bias" in flat else "bias"
        bias = flag(flat, name, default=not nested)
        expect(flat, {"add_para_norm": (None, False), "logit_scale": (None, 1)})
        check_embedding(files, base, (EMBEDDING, LM_HEAD))
        return Eagle(layer_of(flat, base), fc_bias=bias)

    def layout(self, drafter, config):
        return eagle_layout(drafter, self.layer)

    def config(self, drafter, made_for):
        plain(drafter, Eagle, self.name)
        return released_fields(drafter.config) | {"bias": drafter.fc_bias}


class Eagle3Format(FeatureFormat):
    """EAGLE-3."""

    name = "eagle-3"
    known_by = "released EAGLE-3 (fc. and midlayer.)"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, the official EAGLE code (no llama3 RoPE scaling), SGLang "
        "(`--speculative-algorithm EAGLE3 --speculative-draft-model-path THIS`) and versions of vLLM with the `eagle3` "
        'method: `--speculative-config \'{"method": "eagle3", "model": "THIS", "num_speculative_tokens": 5}\'`.'
    )
    layer = "midlayer."

    def recognises(self, config, names):
        return any(name.startswith(self.layer) for name in names)

    def drafter(self, config, files, base):
        config = flattened(config)
        return eagle_3_of(config, layer_of(config, base), declared_reads(config, base), files, base)

    def layout(self, drafter, config):
        return eagle_3_layout(drafter, self.layer)

    def config(self, drafter, made_for):
        plain(drafter, Eagle3, self.name)
        if drafter.norm_before_residual:
            raise cannot_write("norm_before_residual is True", "False")
        layers, n_layers = layers_read(drafter, made_for)
        if len(layers) != 3 or drafter.reads != reads_of(n_layers):
            raise cannot_write(
                f"it reads the inputs of layers {layers} of a base of {n_layers}", "layers 2, L // 2 and L - 3 alone"
            )
        size = drafter.lm_head.size(drafter.config.vocab_size)
        fields = released_fields(drafter.config) | {"architectures": ["LlamaForCausalLMEagle3"]}
        return fields | {"draft_vocab_size": size}

    def constants(self, drafter):
        return token_tensors(drafter)


class VLLMEagle3(Eagle3Format):
    """EAGLE-3 with vLLM's name of the layer; read only."""

    name = "vllm-eagle-3"
    known_by = "vLLM's EAGLE-3 (layers.0.hidden_norm)"
    read_by = ""
    layer = "layers.0."

    def recognises(self, config, names):
        return f"{self.layer}hidden_norm.weight" in names


def flattened(config: dict) -> dict:
    """The fields of a LLaMA's ``config.json``, out of vLLM's own if it is one."""
    if config.get("model_type") != NESTED:
        return config
    layer = config.get("model")
    if not isinstance(layer, dict):
        raise HydrajaxError(f"{CONFIG}: model must be an object where model_type is '{NESTED}', found {layer!r}")
    outer = {name: value for name, value in config.items() if value is not None}
    flat = layer | {name: outer[name] for name in outer if name not in ("model", "model_type", "architectures")}
    expect(flat, {"truncated_vocab_size": (flat.get("vocab_size"), None)})
    return flat


def declared_reads(config: dict, base: LlamaConfig) -> tuple[int, ...]:
    """What the draft reads: as the field of vLLM says, or that of SGLang; else the default."""
    own = config.get("eagle_config")
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise HydrajaxError(f"{CONFIG}: eagle_config must be an object, found {own!r}")
    on, off = (None, True), (None, False)
    variants = {"use_aux_hidden_state": on, "use_input_layernorm_in_first_layer": on, "use_last_layernorm": on}
    variants |= {"use_mtp_layernorm": off, "return_hidden_post_norm": off}
    expect(own, variants, f"{CONFIG}: eagle_config")
    name = f"eagle_config.{LAYERS}"
    if config.get(LAYERS) and own.get(LAYERS):
        both = f"{CONFIG}: both {LAYERS} and {name} are given"
        raise HydrajaxError(f"{both}, supported is one, as programs number the layers differently in them")
    if own.get(LAYERS):
        return reads_from(own[LAYERS], base, name, inputs_of=1)
    return reads_from(config.get(LAYERS), base, LAYERS)


def released_fields(layer: LlamaConfig) -> dict[str, Any]:
    """`layer_fields`, as the official code reads them."""
    fields = layer_fields(layer)
    if layer.rope_scaling is not None and layer.rope_scaling.kind == "linear":
        # It takes these two fields and no others, nor any other kind of scaling but "dynamic".
        fields["rope_scaling"] = {"type": "linear", "factor": float(layer.rope_scaling.factor)}
    return fields


# --- settings in our own format ---------------------------------------------------------------------------------------


def check(heads: FeatureDrafter, base: LlamaConfig) -> None:
    """`hydrajax.formats.interface.Files.check`."""
    c: LlamaConfig = heads.config
    for name in ("depth", "unroll"):
        if not 1 <= getattr(heads, name) <= MOST:
            raise ValueError(f"{name} is {getattr(heads, name)}, allowed are 1 to {MOST}")
    if c != c.plain_layer:
        raise ValueError(f"config is not that of LLaMA's plain layer: {c}")
    check_sizes((c.vocab_size, c.width), base)
    if max(c.mlp_width, c.n_heads * c.head_dim) > MOST * c.width:
        raise ValueError(f"config has an mlp_width of {c.mlp_width} and {c.n_heads} heads of {c.head_dim}")
    if not isinstance(heads, Eagle3):
        return
    if len(heads.reads) > base.n_layers or not all(0 <= place <= base.n_layers for place in heads.reads):
        raise HydrajaxError(
            f"the heads were made for another base: reads is {list(heads.reads)}, this one has {base.n_layers} layers"
        )
    if heads.vocabulary is not None and (last := int(heads.vocabulary.tokens[-1])) >= base.vocab_size:
        raise HydrajaxError(
            f"the heads were made for another base: they know token {last}, this one has {base.vocab_size}"
        )


def about(heads: FeatureDrafter) -> About:
    c: LlamaConfig = heads.config
    rows = {
        "draft": f"one layer, up to {heads.depth} tokens ahead",
        "width, vocabulary": f"{c.width}, {c.vocab_size}",
    }
    if not isinstance(heads, Eagle3):
        return About("EAGLE heads", "eagle", rows)
    rows["tokens it knows"] = str(heads.lm_head.size(c.vocab_size))
    rows["reads"] = f"{len(heads.reads)} layers of the base"
    return About("EAGLE-3 heads", "eagle3", rows)


def config_from_json(found: Any, kind: type = LlamaConfig) -> Any:
    """The inverse of `dataclasses.asdict`. Raises `TypeError` or `ValueError` for what that does not write."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values = dict(found)
    if unknown := values.keys() - types.keys():
        raise ValueError(f"config has {', '.join(sorted(map(str, unknown)))}")
    for name, value in values.items():
        wanted = types[name]
        if value is None and wanted.endswith(" | None"):
            continue
        if wanted.startswith("RopeScaling"):
            values[name] = config_from_json(value, RopeScaling)
        elif wanted == "float" and type(value) in (int, float) and math.isfinite(value):
            values[name] = float(value)
        elif wanted.startswith("int") and type(value) is int and abs(value) < 2**31:
            pass
        elif wanted not in ("bool", "str") or type(value).__name__ != wanted:
            raise ValueError(f"{name} of config is {value!r}")
    return kind(**values)


def numbers_from_json(found: Any) -> list[int]:
    """A list of numbers from 0 to 2 ** 31 - 1, not empty."""
    if not isinstance(found, list) or not found or any(type(x) is not int or not 0 <= x < 2**31 for x in found):
        raise ValueError("reads or vocabulary is no list of numbers of at most 31 bits")
    return found


CONFIG_CODEC = dataclasses.asdict, config_from_json
READS_CODEC = list, lambda found: tuple(numbers_from_json(found))
VOCABULARY_CODEC = (
    lambda vocabulary: None if vocabulary is None else vocabulary.tokens.tolist(),
    lambda found: Vocabulary(numbers_from_json(found)),
)
EAGLE, EAGLE_3, VLLM_EAGLE_3 = EagleFormat(), Eagle3Format(), VLLMEagle3()
EAGLE_FILES = Files(Eagle, (EAGLE,), check, about, {"config": CONFIG_CODEC})
EAGLE_3_FILES = Files(
    Eagle3,
    (EAGLE_3, VLLM_EAGLE_3, SPECULATORS),
    check,
    about,
    {"config": CONFIG_CODEC, "reads": READS_CODEC, "vocabulary": VOCABULARY_CODEC},
)
