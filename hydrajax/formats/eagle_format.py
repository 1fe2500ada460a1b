"""The files of EAGLE drafts: as their authors released them (SafeAILab/EAGLE), and as vLLM names them.

A released directory holds ``config.json``, which is that of a LLaMA of one layer, and ``pytorch_model.bin`` or
``model.safetensors``. EAGLE-1 (and 2, whose weights are of the same kind) names its tensors ``fc.*`` and
``layers.0.*``, the first layer being without ``input_layernorm``. EAGLE-3 names them ``fc.weight``, ``midlayer.*``,
``norm.weight`` and ``lm_head.weight``, with ``d2t`` and ``t2d`` where it knows some tokens only. The files may hold a
copy of the base's embedding, which is not read and not written.

vLLM reads these, and the same tensors with a ``config.json`` of its own: ``model_type`` is ``eagle``, and ``model``
holds the layer's fields, of which those beside it overrule some (``vllm/transformers_utils/configs/eagle.py``). To it
``midlayer.`` and ``layers.0.`` are one name. For speculators see `hydrajax.formats.speculators`.

The layer is a LLaMA's of one layer in all formats. The tokens that an EAGLE-3 draft knows are two tensors: ``d2t`` says
of the i-th of them how far its id lies above i, and ``t2d`` says of every token of the base whether it is known.

Programs number the base's layers in two ways, which is one apart. What a draft reads is the *input* of the layers 2,
L // 2 and L - 3, counted from 0 (SafeAILab/EAGLE ``eagle/model/modeling_llama_kv.py``). vLLM and speculators give a
layer that number. SGLang gives the number of the layer before, whose *output* it is. Ours count from the end
(`hydrajax.models.base_model.BaseModel.__call__`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.draft_lm_head import Vocabulary
from hydrajax.drafters.eagle import Eagle, EagleDrafter
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.errors import HydrajaxError
from hydrajax.families import llama_family
from hydrajax.families.family import decoder_layer
from hydrajax.families.family_registry import to_llama_config
from hydrajax.formats.interface import (
    CONFIG,
    MOST,
    About,
    Files,
    HeadFormat,
    MadeFor,
    cannot_write,
    check_sizes,
    drafter_name,
    expect,
    flag,
    integer,
)
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import MODEL, Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

EMBEDDING, OFFSETS, KNOWN = "embed_tokens.weight", "d2t", "t2d"
IGNORED = r"embed_tokens\.weight|.*rotary_emb\.inv_freq|d2t|t2d"  # the embedding is a copy of the base's
INTEGERS, FLAGS = ("I64", "I32", "int64", "int32"), ("BOOL", "bool")  # as safetensors and as torch call them
LAYERS = "eagle_aux_hidden_state_layer_ids"  # the field of config.json that says which layers of the base are read
NESTED = "eagle"  # the model_type of vLLM's own config.json
LM_HEAD = "lm_head.weight"


class FeatureFormat(HeadFormat):
    """A format of EAGLE drafts. layer: how the names of the decoder layer's tensors begin; fc: those of the map."""

    stem = MODEL
    ignored = IGNORED
    dtype_field = "torch_dtype"
    layer: str
    fc = "fc"

    def settled(self, drafter, files, dtype):
        fc = next(name for entry in self.layout(drafter, {}) for name in entry.theirs)
        own = {"dtype": jnp.dtype(files.dtype(fc) if dtype is None else dtype)}
        if isinstance(drafter, Eagle3) and drafter.vocabulary is not None:
            own["vocabulary"] = tokens_of(files, drafter.config.vocab_size)
        return dataclasses.replace(drafter, **own)


# --- key maps ---------------------------------------------------------------------------------------------------------


def eagle_layout(drafter: Eagle, layer: str, fc: str = "fc") -> Layout:
    """EAGLE-1's. layer, fc: what the names of the decoder layer's tensors and of the map in front of it begin with."""
    width = drafter.config.width
    bias = [same(("fc_bias",), f"{fc}.bias", width)] if drafter.fc_bias else []
    kernel = transposed(("fc",), f"{fc}.weight", width, 2 * width)
    return [kernel, *bias, *decoder_layer(("layer",), layer, drafter.config, attends_from=width)]


def eagle_3_layout(drafter: Eagle3, layer: str) -> Layout:
    """EAGLE-3's, as `eagle_layout`."""
    c, width = drafter.config, drafter.config.width
    return [
        transposed(("fc",), "fc.weight", width, len(drafter.aux_hidden_layers) * width),
        same(("embedding_norm", "scale"), f"{layer}input_layernorm.weight", width),
        same(("hidden_norm", "scale"), f"{layer}hidden_norm.weight", width),
        *decoder_layer(("layer",), layer, c, attends_from=2 * width),
        same(("norm", "scale"), "norm.weight", width),
        transposed(("lm_kernel",), "lm_head.weight", drafter.lm_head.size(c.vocab_size), width),
    ]


# --- the layer --------------------------------------------------------------------------------------------------------


def layer_of(config: dict[str, Any], base: LlamaConfig, where: str = CONFIG) -> LlamaConfig:
    """The draft's decoder layer, as ``config.json`` describes it. Raises `HydrajaxError` where it does not fit.

    where: what to call the place of the description in messages.
    """
    # The layer is a LLaMA's whatever family the base is of, which some files name here.
    found = to_llama_config(config | {"model_type": "llama"}, where)
    check_sizes((found.vocab_size, found.width), base)
    if found.n_layers != 1:
        raise HydrajaxError(f"{where}: num_hidden_layers is {found.n_layers}, supported is 1 in an EAGLE draft")
    expect(config, {"layer_types": (["full_attention"], None)}, where)
    for rope in (config, config.get("rope_parameters") or {}):
        expect(rope, {"partial_rotary_factor": (None, 1)}, where)
    # Both are the base's: a draft lives in its context, and has nothing that could be tied.
    return found.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head)


def layer_fields(layer: LlamaConfig) -> dict[str, Any]:
    """The inverse of `layer_of`: the fields of a LLaMA of one layer."""
    if layer != layer.plain_layer:
        raise cannot_write(f"the draft's layer is {layer}", "LLaMA's plain layer")
    return llama_family.FAMILY.write(layer.replace(tied_lm_head=False))


def check_embedding(files: TensorFiles, base: LlamaConfig, names: tuple[str, ...] = (EMBEDDING,)) -> None:
    """Refuse files whose copies of the base's embedding, or lm head, are another base's by their size."""
    for name in names:
        if name in files:
            check_sizes(files.shape(name), base)


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------

OFF = (None, False)
VARIANTS = {  # of EAGLE-3, each of which computes something else
    "norm_before_fc": OFF,
    "fc_norm": OFF,
    "norm_output": OFF,
    "embed_requires_grad": OFF,  # then the embedding is not the base's
    "parallel_drafting": OFF,
    "logit_scale": (None, 1),
}


def eagle_3_of(
    config: dict, layer: LlamaConfig, aux_hidden_layers: tuple[int, ...], files: TensorFiles, base: LlamaConfig
) -> Eagle3:
    """The draft that ``config.json`` describes besides its layer and what it reads.

    Which tokens it knows is in a tensor, of which only the size is known here; see `FeatureFormat.settled`.
    """
    expect(config, VARIANTS | {"target_hidden_size": (base.width, None)})
    check_embedding(files, base)
    norm_before_residual = flag(config, "norm_before_residual", default=False)
    n_known = base.vocab_size
    if config.get("draft_vocab_size") is not None:
        n_known = integer(config, "draft_vocab_size", 1)
    if n_known > base.vocab_size:
        raise HydrajaxError(f"{CONFIG}: draft_vocab_size {n_known} exceeds the base's {base.vocab_size} tokens")
    if n_known == base.vocab_size:
        return Eagle3(layer, aux_hidden_layers, norm_before_residual=norm_before_residual)
    if OFFSETS not in files:
        raise HydrajaxError(f"missing tensor '{OFFSETS}', which says what tokens the {n_known} are")
    if files.shape(OFFSETS) != (n_known,) or files.dtype(OFFSETS) not in INTEGERS:
        found = f"{files.dtype(OFFSETS)} {list(files.shape(OFFSETS))}"
        raise HydrajaxError(f"{OFFSETS} must be int64 [{n_known}] (draft_vocab_size of config.json), found {found}")
    return Eagle3(layer, aux_hidden_layers, Vocabulary(range(n_known)), norm_before_residual=norm_before_residual)


def tokens_of(files: TensorFiles, vocab_size: int) -> Vocabulary:
    """The tokens that ``d2t`` tells of, and ``t2d`` if it is there."""
    offsets = files.read(OFFSETS)
    tokens = np.arange(len(offsets)) + offsets
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        raise HydrajaxError(f"{OFFSETS}: the tokens that it tells of must rise, from 0 up and below {vocab_size}")
    if KNOWN in files:
        if files.shape(KNOWN) != (vocab_size,) or files.dtype(KNOWN) not in FLAGS:
            found = f"{files.dtype(KNOWN)} {list(files.shape(KNOWN))}"
            raise HydrajaxError(f"{KNOWN} must be bool [{vocab_size}] (the base's tokens), found {found}")
        if not np.array_equal(np.flatnonzero(files.read(KNOWN)), tokens):
            raise HydrajaxError(f"{KNOWN} tells of other tokens than {OFFSETS}")
    return Vocabulary(tokens.tolist())


def token_tensors(drafter: Any) -> dict[str, np.ndarray]:
    """``d2t`` (int64) and ``t2d`` (bool) of a draft that knows some tokens; nothing of one that knows all."""
    vocabulary = getattr(drafter, "vocabulary", None)
    if vocabulary is None or len(vocabulary) == drafter.config.vocab_size:
        return {}
    tokens = vocabulary.tokens.astype(np.int64)
    known = np.zeros(drafter.config.vocab_size, bool)
    known[tokens] = True
    return {OFFSETS: tokens - np.arange(len(tokens)), KNOWN: known}


def default_reads(base: LlamaConfig) -> tuple[int, ...]:
    """What a draft reads that does not say it. Raises `HydrajaxError` where these are not three layers."""
    aux_hidden_layers = default_aux_hidden_layers(base.n_layers)
    if len(aux_hidden_layers) < 3 or base.n_layers < 3:
        raise HydrajaxError(
            "EAGLE-3 reads the inputs of the base's layers 2, L // 2 and L - 3, which are three in a base of 3 "
            f"layers or of at least 7; this one has {base.n_layers}"
        )
    return aux_hidden_layers


def reads_from(numbers: Any, base: LlamaConfig, name: str, inputs_of: int = 0) -> tuple[int, ...]:
    """What a draft reads by the numbers of layers that the field ``name`` lists. None and an empty list: the default.

    inputs_of: what to add to a number for the layer whose input is read: 0 as vLLM counts, 1 as SGLang does. They must
    rise, as both programs collect them in the order of the layers.
    """
    if numbers is None or numbers == []:
        return default_reads(base)
    least, most = -inputs_of, base.n_layers - 1 - inputs_of
    good = isinstance(numbers, list) and all(type(x) is int and least <= x <= most for x in numbers)
    if not good or numbers != sorted(set(numbers)):
        raise HydrajaxError(
            f"{CONFIG}: {name} is {numbers!r}, supported are rising numbers from {least} to {most} "
            f"for this base of {base.n_layers} layers"
        )
    return tuple(base.n_layers - (number + inputs_of) for number in numbers)


def layers_read(drafter: Eagle3, made_for: MadeFor) -> tuple[list[int], int]:
    """The layers of the base whose inputs are read, counted from 0 as vLLM does, and how many layers the base has.

    Where nobody said the latter it follows from the default, if the draft reads that of any base.
    """
    aux_hidden_layers, n_layers = drafter.aux_hidden_layers, made_for.n_layers
    if n_layers is None:
        n_layers = next(
            (n for n in range(1, max(aux_hidden_layers) + 3) if default_aux_hidden_layers(n) == aux_hidden_layers), None
        )
    if n_layers is None:
        raise cannot_write(
            f"reads is {aux_hidden_layers}, counted from the last layer of a base of unknown depth",
            "others where its fingerprint is given",
        )
    layers = [n_layers - place for place in aux_hidden_layers]
    if min(aux_hidden_layers) < 1 or layers[0] < 0 or layers != sorted(set(layers)):
        raise cannot_write(
            f"reads is {aux_hidden_layers} in a base of {n_layers} layers", "inputs of its layers, from low to high"
        )
    return layers, n_layers


def plain(drafter: Any, kind: type, format: str) -> Any:
    """The drafter itself; raises `HydrajaxError` if it is not of this class, or is behind a prefix layer."""
    if type(drafter) is not kind:
        raise cannot_write(f"drafter is {drafter_name(drafter)}", f"{kind.__name__}, for format {format}")
    return drafter


# --- the formats ------------------------------------------------------------------------------------------------------


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
        if len(layers) != 3 or drafter.aux_hidden_layers != default_aux_hidden_layers(n_layers):
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


EAGLE, EAGLE_3, VLLM_EAGLE_3 = EagleFormat(), Eagle3Format(), VLLMEagle3()


def files(*formats: HeadFormat) -> Files:
    return Files(formats, check, about)


def check(heads: EagleDrafter, base: LlamaConfig) -> None:
    """`Files.check`."""
    c: LlamaConfig = heads.config
    for name in ("depth", "ttt_length"):
        if not 1 <= getattr(heads, name) <= MOST:
            raise ValueError(f"{name} is {getattr(heads, name)}, allowed are 1 to {MOST}")
    if c != c.plain_layer:
        raise ValueError(f"config is not that of LLaMA's plain layer: {c}")
    check_sizes((c.vocab_size, c.width), base)
    if max(c.mlp_width, c.n_heads * c.head_dim) > MOST * c.width:
        raise ValueError(f"config has an mlp_width of {c.mlp_width} and {c.n_heads} heads of {c.head_dim}")
    if not isinstance(heads, Eagle3):
        return
    if len(heads.aux_hidden_layers) > base.n_layers or not all(
        0 <= place <= base.n_layers for place in heads.aux_hidden_layers
    ):
        raise HydrajaxError(
            f"aux_hidden_layers: got {list(heads.aux_hidden_layers)}, expected layers of this base, which has "
            f"{base.n_layers}"
        )
    if heads.vocabulary is not None and (last := int(heads.vocabulary.tokens[-1])) >= base.vocab_size:
        raise HydrajaxError(
            f"the heads were made for another base: they know token {last}, this one has {base.vocab_size}"
        )


def about(heads: EagleDrafter) -> About:
    c: LlamaConfig = heads.config
    rows = {
        "draft": f"one layer, up to {heads.depth} tokens ahead",
        "width, vocabulary": f"{c.width}, {c.vocab_size}",
    }
    if not isinstance(heads, Eagle3):
        return About("EAGLE heads", "eagle", rows)
    rows["tokens it knows"] = str(heads.lm_head.size(c.vocab_size))
    rows["reads"] = f"{len(heads.aux_hidden_layers)} layers of the base"
    return About("EAGLE-3 heads", "eagle3", rows)
