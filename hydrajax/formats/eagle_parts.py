"""Parts that files of EAGLE share with those of P-EAGLE and of drafts of one pass.

Key maps of EAGLE-1 and EAGLE-3, the fields of a draft's decoder layer, reduced vocabularies (``d2t``, ``t2d``), and the
numbers of the base's layers that a draft reads. `hydrajax.formats.eagle_format` describes the files.
"""

import dataclasses
from typing import Any

import numpy as np

from hydrajax.drafters.eagle import Eagle, EagleDrafter
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.formats import interface
from hydrajax.formats.interface import CONFIG
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

EMBEDDING, LM_HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
INTEGERS, BOOLS = ("I64", "I32", "int64", "int32"), ("BOOL", "bool")  # names of safetensors and of torch
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle"  # model_type of vLLM's own config.json
KIND, LAYER = "speculators_model_type", "transformer_layer_config"  # fields of speculators
OFF, ON = (None, False), (None, True)
VARIANTS = {  # of EAGLE-3, which are not implemented
    "norm_before_fc": OFF,
    "fc_norm": OFF,
    "norm_output": OFF,
    "embed_requires_grad": OFF,  # the embedding is then not the base's
    "parallel_drafting": OFF,
    "logit_scale": (None, 1),
}


def eagle_layout(drafter: Eagle, layer: str, fc: str = "fc") -> Layout:
    """Return EAGLE-1's key map; ``layer`` and ``fc`` are the prefixes of the layer's and the projection's tensor
    names.
    """
    width = drafter.config.width
    bias = [same(("fc_bias",), f"{fc}.bias", width)] if drafter.fc_bias else []
    kernel = transposed(("fc",), f"{fc}.weight", width, 2 * width)
    return [kernel, *bias, *decoder_layer(("layer",), layer, drafter.config, attention_width=width)]


def eagle_3_layout(drafter: Eagle3, layer: str) -> Layout:
    """Return EAGLE-3's key map; ``layer`` as in `FeatureFormat`."""
    c, width = drafter.config, drafter.config.width
    return [
        transposed(("fc",), "fc.weight", width, len(drafter.aux_hidden_layers) * width),
        same(("embedding_norm", "scale"), f"{layer}input_layernorm.weight", width),
        same(("hidden_norm", "scale"), f"{layer}hidden_norm.weight", width),
        *decoder_layer(("layer",), layer, c, attention_width=2 * width),
        same(("norm", "scale"), "norm.weight", width),
        transposed(("lm_kernel",), LM_HEAD, drafter.lm_head.size(c.vocab_size), width),
    ]


def read_layer(config: dict[str, Any], base: LlamaConfig, where: str = CONFIG) -> LlamaConfig:
    """Return the draft's decoder layer; ``where`` begins error messages."""
    interface.refuse_quantized(config, where)
    # Some files give the base's model_type; the layer is LLaMA's anyway.
    found = to_llama_config(config | {"model_type": "llama"}, where)
    interface.check_sizes((found.vocab_size, found.width), base)
    if found.n_layers != 1:
        raise HydrajaxError(f"{where}: num_hidden_layers: got {found.n_layers}, expected 1 in an EAGLE draft")
    interface.expect(config, {"layer_types": (["full_attention"], None)}, where)
    for rope in (config, config.get("rope_parameters") or {}):
        interface.expect(rope, {"partial_rotary_factor": (None, 1)}, where)
    # A draft has the base's context and no lm head to tie.
    return found.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head)


def layer_fields(layer: LlamaConfig) -> dict[str, Any]:
    """Return the fields of a one-layer LLaMA, the inverse of `read_layer`."""
    if layer != layer.plain_layer:
        raise interface.cannot_write("config", layer, "LLaMA's plain layer")
    return from_llama_config(layer.replace(tied_lm_head=False), CONFIG)


def released_fields(layer: LlamaConfig) -> dict[str, Any]:
    """Return `layer_fields` as the official code reads them."""
    fields = layer_fields(layer)
    if layer.rope_scaling is not None and layer.rope_scaling.kind == "linear":
        # The official code accepts exactly these two fields, and no other kind than "dynamic".
        fields["rope_scaling"] = {"type": "linear", "factor": float(layer.rope_scaling.factor)}
    return fields


def flattened(config: dict) -> dict:
    """Return the fields of a LLaMA's ``config.json``, out of vLLM's nested one."""
    if config.get("model_type") != NESTED:
        return config
    layer = config.get("model")
    if not isinstance(layer, dict):
        raise HydrajaxError(f"{CONFIG}: model: got {layer!r}, expected an object for model_type '{NESTED}'")
    inner = ("model", "model_type", "architectures")
    flat = layer | {name: value for name, value in config.items() if value is not None and name not in inner}
    interface.expect(flat, {"truncated_vocab_size": (flat.get("vocab_size"), None)})
    return flat


def check_class(drafter: Any, kind: type) -> None:
    """Refuse a drafter of another class, or with a prefix layer."""
    if type(drafter) is not kind:
        raise interface.cannot_write("drafter", interface.drafter_name(drafter), kind.__name__)


def check_vocabulary(heads: EagleDrafter, base: LlamaConfig) -> None:
    """Refuse a reduced vocabulary with tokens that the base does not have."""
    if heads.vocabulary is not None and (last := int(heads.vocabulary.tokens[-1])) >= base.vocab_size:
        raise HydrajaxError(
            f"vocabulary: got token {last}, expected ids below {base.vocab_size}; the heads were made for another base"
        )


def check_aux_layers(heads: Any, base: LlamaConfig) -> None:
    """Refuse layers to read that the base does not have."""
    layers = heads.aux_hidden_layers
    if not 1 <= len(layers) <= base.n_layers or not all(0 <= layer <= base.n_layers for layer in layers):
        raise HydrajaxError(
            f"aux_hidden_layers: got {list(layers)}, expected layers of this base, which has {base.n_layers}"
        )


def check_all_tokens(drafter: Any) -> None:
    """Refuse a reduced vocabulary, for which a format has no place."""
    if drafter.vocabulary is not None:
        raise interface.cannot_write(
            "vocabulary", f"{len(drafter.vocabulary)} tokens", f"all {drafter.config.vocab_size}"
        )


def read_eagle_3(
    config: dict, layer: LlamaConfig, aux_hidden_layers: tuple[int, ...], files: TensorFiles, base: LlamaConfig
) -> Eagle3:
    """Return the draft; of a reduced vocabulary only the size is known, until `FeatureFormat.settled`."""
    interface.expect(config, VARIANTS | {"target_hidden_size": (base.width, None)})
    interface.check_copies(files, base, EMBEDDING)
    norm_before_residual = interface.flag(config, "norm_before_residual", default=False)
    vocabulary = draft_vocabulary(config, files, base)
    return Eagle3(layer, aux_hidden_layers, vocabulary, norm_before_residual=norm_before_residual)


def draft_vocabulary(config: dict, files: TensorFiles, base: LlamaConfig) -> Vocabulary | None:
    """Return a vocabulary of the right size, None for all tokens; `read_vocabulary` returns its tokens."""
    size = base.vocab_size
    if config.get("draft_vocab_size") is not None:
        size = interface.integer(config, "draft_vocab_size", 1)
    if size > base.vocab_size:
        raise HydrajaxError(f"{CONFIG}: draft_vocab_size: got {size}, expected at most the base's {base.vocab_size}")
    if size == base.vocab_size:
        return None
    if D2T not in files:
        raise HydrajaxError(f"missing tensor '{D2T}', the ids of the {size} draft tokens")
    _check_mapping(files, D2T, size, INTEGERS, "int64")
    return Vocabulary(range(size))


def nested_layer(config: dict) -> dict:
    """Return the fields of the layers in a ``config.json`` of speculators."""
    fields = config.get(LAYER)
    if not isinstance(fields, dict):
        raise HydrajaxError(f"{CONFIG}: {LAYER}: got {fields!r}, expected an object")
    return fields


def with_vocabulary(drafter: Any, files: TensorFiles) -> Any:
    """Return the drafter with the tokens of its reduced vocabulary, of which only the number was known."""
    if drafter.vocabulary is None:
        return drafter
    return dataclasses.replace(drafter, vocabulary=read_vocabulary(files, drafter.config.vocab_size))


def read_vocabulary(files: TensorFiles, vocab_size: int) -> Vocabulary:
    """Return the draft tokens by ``d2t``, checked against ``t2d`` if the file has it."""
    offsets = files.read(D2T)
    tokens = np.arange(len(offsets)) + offsets
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        raise HydrajaxError(f"{D2T}: expected increasing token ids from 0 to {vocab_size - 1}")
    if T2D in files:
        _check_mapping(files, T2D, vocab_size, BOOLS, "bool")
        if not np.array_equal(np.flatnonzero(files.read(T2D)), tokens):
            raise HydrajaxError(f"{T2D}: got other tokens than in {D2T}")
    return Vocabulary(tokens.tolist())


def _check_mapping(files: TensorFiles, name: str, size: int, dtypes: tuple[str, ...], expected: str) -> None:
    if files.shape(name) != (size,) or files.dtype(name) not in dtypes:
        found = f"{files.dtype(name)} {list(files.shape(name))}"
        raise HydrajaxError(f"{name}: got {found}, expected {expected} [{size}]")


def read_aux_layers(numbers: Any, base: LlamaConfig, name: str, offset: int = 0) -> tuple[int, ...]:
    """Return ``aux_hidden_layers`` of the layer numbers in field ``name``; None and an empty list are the default.

    Args:
        offset: From a number to the layer whose input is read: 0 in vLLM, 1 in SGLang. Both programs collect the hidden
            states in the order of the layers, so the numbers must increase.
    """
    if numbers is None or numbers == []:
        layers = default_aux_hidden_layers(base.n_layers)
        if len(layers) < 3 or base.n_layers < 3:
            raise HydrajaxError(
                f"base: got {base.n_layers} layers, expected 3 or at least 7: EAGLE-3 reads the inputs of layers 2, "
                "L // 2 and L - 3"
            )
        return layers
    least, most = -offset, base.n_layers - 1 - offset
    good = isinstance(numbers, list) and all(type(x) is int and least <= x <= most for x in numbers)
    if not good or numbers != sorted(set(numbers)):
        raise HydrajaxError(
            f"{CONFIG}: {name}: got {numbers!r}, expected increasing numbers from {least} to {most} for this base of "
            f"{base.n_layers} layers"
        )
    return tuple(base.n_layers - (number + offset) for number in numbers)


def layers_read(drafter: Eagle3, made_for: interface.MadeFor) -> tuple[list[int], int]:
    """Return the layers whose inputs are read, as vLLM counts, and the base's number of layers.

    An unknown number of layers is inferred if the draft reads the default ones of some base.
    """
    aux, n_layers = drafter.aux_hidden_layers, made_for.n_layers
    if n_layers is None:
        n_layers = next((n for n in range(1, max(aux) + 3) if default_aux_hidden_layers(n) == aux), None)
    if n_layers is None:
        raise interface.cannot_write(
            "aux_hidden_layers", f"{aux} of a base of unknown depth", "a base with a fingerprint"
        )
    layers = [n_layers - from_last for from_last in aux]
    if min(aux) < 1 or layers[0] < 0 or layers != sorted(set(layers)):
        raise interface.cannot_write(
            "aux_hidden_layers", f"{aux} of {n_layers} layers", "inputs of its layers, in order"
        )
    return layers, n_layers
