"""Files of EAGLE drafts: as released (SafeAILab/EAGLE), vLLM's variants, and those of vLLM's library speculators.

A released directory holds ``config.json`` of a one-layer LLaMA, and ``pytorch_model.bin`` or ``model.safetensors``:

- EAGLE-1 and 2: ``fc.*`` and ``layers.0.*``, without ``input_layernorm``
- EAGLE-3: ``fc.weight``, ``midlayer.*``, ``norm.weight``, ``lm_head.weight``. With a reduced vocabulary also ``d2t``
  (id of the i-th draft token minus i) and ``t2d`` (mask of the draft tokens over the base's vocabulary).

A copy of the base's embedding may be there; it is not read and not written.

vLLM also reads a ``config.json`` with ``model_type`` ``eagle`` whose ``model`` holds the layer's fields, which outer
fields override (``vllm/transformers_utils/configs/eagle.py``), and ``layers.0.`` for ``midlayer.``.

speculators (vllm-project/speculators) has ``speculators_model_type``, the layer as ``transformer_layer_config``, and
the base and the number of draft tokens as ``speculators_config``. Its EAGLE-3 (``src/speculators/models/eagle3``) has
``layers.0.*`` for ``midlayer.*``. Its EAGLE-1, dropped by newer versions, has ``fusion_fc.*`` and ``transformer.*``.

EAGLE-3 reads the *inputs* of the base's layers 2, L // 2 and L - 3, counted from 0 (SafeAILab/EAGLE
``eagle/model/modeling_llama_kv.py``). vLLM and speculators use these numbers; SGLang numbers the layers whose *output*
is read, which are one lower. `hydrajax.models.base_model.BaseModel.__call__` counts from the last layer.
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
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.formats.interface import (
    CONFIG,
    MOST,
    About,
    Files,
    HeadFormat,
    MadeFor,
    cannot_write,
    check_copies,
    check_sizes,
    drafter_name,
    expect,
    flag,
    integer,
    refuse_quantized,
)
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import MODEL, Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

EMBEDDING, LM_HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
IGNORED = r"embed_tokens\.weight|.*rotary_emb\.inv_freq|d2t|t2d"  # the embedding is a copy of the base's
INTEGERS, BOOLS = ("I64", "I32", "int64", "int32"), ("BOOL", "bool")  # names of safetensors and of torch
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle"  # model_type of vLLM's own config.json
KIND, LAYER = "speculators_model_type", "transformer_layer_config"  # fields of speculators
ONE_PASS = ("dflash", "dspark")  # kinds that `hydrajax.formats.block_format` reads
P_EAGLE, MASK_HIDDEN = "peagle", "mask_hidden"  # kind and tensor of `hydrajax.formats.peagle_format`
DRAFT_TOKENS = 5  # vLLM's num_speculative_tokens unless it is given
OFF, ON = (None, False), (None, True)
VARIANTS = {  # of EAGLE-3, which are not implemented
    "norm_before_fc": OFF,
    "fc_norm": OFF,
    "norm_output": OFF,
    "embed_requires_grad": OFF,  # the embedding is then not the base's
    "parallel_drafting": OFF,
    "logit_scale": (None, 1),
}
EAGLE_CONFIG = {  # variants in SGLang's eagle_config
    "use_aux_hidden_state": ON,
    "use_input_layernorm_in_first_layer": ON,
    "use_last_layernorm": ON,
    "use_mtp_layernorm": OFF,
    "return_hidden_post_norm": OFF,
}


class FeatureFormat(HeadFormat):
    """A format of EAGLE drafts.

    Attributes:
        layer: prefix of the decoder layer's tensor names.
    """

    stem = MODEL
    ignored = IGNORED
    dtype_field = "torch_dtype"
    layer: str

    def layout(self, drafter, config):
        if isinstance(drafter, Eagle):
            return eagle_layout(drafter, self.layer)
        return eagle_3_layout(drafter, self.layer)

    def settled(self, drafter, files, dtype):
        fc = next(name for entry in self.layout(drafter, {}) for name in entry.theirs)
        own = {"dtype": jnp.dtype(files.dtype(fc) if dtype is None else dtype)}
        if isinstance(drafter, Eagle3) and drafter.vocabulary is not None:
            own["vocabulary"] = read_vocabulary(files, drafter.config.vocab_size)
        return dataclasses.replace(drafter, **own)

    def constants(self, drafter):
        """``d2t`` (int64) and ``t2d`` (bool) of a reduced vocabulary."""
        vocabulary = getattr(drafter, "vocabulary", None)
        if vocabulary is None or len(vocabulary) == drafter.config.vocab_size:
            return {}
        tokens = vocabulary.tokens.astype(np.int64)
        mask = np.zeros(drafter.config.vocab_size, bool)
        mask[tokens] = True
        return {D2T: tokens - np.arange(len(tokens)), T2D: mask}


class EagleFormat(FeatureFormat):
    """EAGLE-1 and 2."""

    name = "eagle"
    known_by = "released EAGLE (fc. and layers.0.)"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, the official EAGLE code since 2025 (`use_eagle3=False`; no "
        "llama3 RoPE scaling), and versions of vLLM with the `eagle` method, drafts without a bias: "
        '`--speculative-config \'{"method": "eagle", "model": "THIS", "num_speculative_tokens": 5}\'`.'
    )
    ignored = IGNORED + r"|lm_head\.weight"  # vLLM's own files also copy the base's lm head
    layer = "layers.0."

    def recognises(self, config, names):
        return any(name.startswith(self.layer) for name in names) and f"{self.layer}hidden_norm.weight" not in names

    def drafter(self, config, files, base):
        # The official code and vLLM differ in the bias's default, and vLLM's own files in its name.
        flat, nested = flattened(config), config.get("model_type") == NESTED
        name = "eagle_fc_bias" if nested and "eagle_fc_bias" in flat else "bias"
        expect(flat, {"add_para_norm": OFF, "logit_scale": (None, 1)})
        check_copies(files, base, EMBEDDING, LM_HEAD)
        return Eagle(read_layer(flat, base), fc_bias=flag(flat, name, default=not nested))

    def config(self, drafter, made_for):
        check_class(drafter, Eagle)
        check_all_tokens(drafter)
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
        return any(name.startswith(self.layer) for name in names) and MASK_HIDDEN not in names

    def drafter(self, config, files, base):
        config = flattened(config)
        own = {} if config.get("eagle_config") is None else config["eagle_config"]
        if not isinstance(own, dict):
            raise HydrajaxError(f"{CONFIG}: eagle_config: got {own!r}, expected an object")
        expect(own, EAGLE_CONFIG, f"{CONFIG}: eagle_config")
        name, offset = AUX_LAYERS, 0
        if own.get(AUX_LAYERS):
            name, offset = f"eagle_config.{AUX_LAYERS}", 1
            if config.get(AUX_LAYERS):
                raise HydrajaxError(f"{CONFIG}: got both {AUX_LAYERS} and {name}, which count differently; remove one")
        numbers = (own if offset else config).get(AUX_LAYERS)
        return read_eagle_3(config, read_layer(config, base), read_aux_layers(numbers, base, name, offset), files, base)

    def config(self, drafter, made_for):
        check_class(drafter, Eagle3)
        if drafter.norm_before_residual:
            raise cannot_write("norm_before_residual", True, False)
        layers, n_layers = layers_read(drafter, made_for)
        if len(layers) != 3 or drafter.aux_hidden_layers != default_aux_hidden_layers(n_layers):
            raise cannot_write(
                "aux_hidden_layers", f"inputs of layers {layers} of {n_layers}", "those of 2, L // 2 and L - 3"
            )
        fields = released_fields(drafter.config) | {"architectures": ["LlamaForCausalLMEagle3"]}
        return fields | {"draft_vocab_size": drafter.lm_head.size(drafter.config.vocab_size)}


class VLLMEagle3(Eagle3Format):
    """EAGLE-3 with vLLM's name of the layer. Read only."""

    name = "vllm-eagle-3"
    known_by = "vLLM's EAGLE-3 (layers.0.hidden_norm)"
    read_by = ""
    layer = "layers.0."

    def recognises(self, config, names):
        return f"{self.layer}hidden_norm.weight" in names and MASK_HIDDEN not in names


class Speculators(FeatureFormat):
    """EAGLE-3, and EAGLE-1 without further norms."""

    name = "speculators"
    known_by = "EAGLE of speculators (speculators_model_type 'eagle3' or 'eagle')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, speculators (older versions EAGLE-1 too), and versions of vLLM "
        "with the `eagle3` method: "
        f'`--speculative-config \'{{"method": "eagle3", "model": "THIS", "num_speculative_tokens": {DRAFT_TOKENS}}}\'`.'
    )
    ignored = IGNORED + r"|verifier_(norm|lm_head)\.weight"  # the base's, which some versions saved

    def recognises(self, config, names):
        return KIND in config and config[KIND] not in (*ONE_PASS, P_EAGLE)

    def drafter(self, config, files, base):
        kind, where = config[KIND], f"{CONFIG}: {LAYER}"
        if kind not in ("eagle3", "eagle"):
            raise HydrajaxError(f"{CONFIG}: {KIND}: got {kind!r}, expected 'eagle3' or 'eagle'")
        fields = nested_layer(config)
        # Here model_type is the layer's: Qwen 3's has norms that LLaMA's does not have.
        expect(fields, {"model_type": ("llama",)}, where)
        layer = read_layer(fields | {"quantization_config": config.get("quantization_config")}, base, where)
        if kind == "eagle3":
            # No default: a missing norm_before_residual means true to vLLM and false to speculators.
            flag(config, "norm_before_residual")
            integer(config, "draft_vocab_size", 1)
            aux_hidden_layers = read_aux_layers(config.get(AUX_LAYERS), base, AUX_LAYERS)
            return read_eagle_3(config, layer, aux_hidden_layers, files, base)
        check_copies(files, base, EMBEDDING)
        expect(config, {"transformer_layer_architecture": ("LlamaDecoderLayer", None), "layernorms": OFF})
        return Eagle(layer, fc_bias=flag(config, "fusion_bias", default=False))

    def layout(self, drafter, config):
        if isinstance(drafter, Eagle):
            return eagle_layout(drafter, "transformer.", "fusion_fc")
        return eagle_3_layout(drafter, "layers.0.")

    def config(self, drafter, made_for):
        if type(drafter) is Eagle:
            check_all_tokens(drafter)
            fields = {
                "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
                KIND: "eagle",
                "transformer_layer_architecture": "LlamaDecoderLayer",
                LAYER: layer_fields(drafter.config),
                "layernorms": False,
                "fusion_bias": drafter.fc_bias,
            }
        else:
            check_class(drafter, Eagle3)
            fields = {
                "architectures": ["Eagle3Speculator"],
                KIND: "eagle3",
                LAYER: layer_fields(drafter.config),
                "draft_vocab_size": drafter.lm_head.size(drafter.config.vocab_size),
                "norm_before_residual": drafter.norm_before_residual,
                AUX_LAYERS: layers_read(drafter, made_for)[0],
            }
        method = {"proposal_type": "greedy", "speculative_tokens": min(drafter.depth, DRAFT_TOKENS)}
        fields["speculators_config"] = {
            "algorithm": fields[KIND],
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": made_for.name, "architectures": []},
        }
        return fields


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
    refuse_quantized(config, where)
    # Some files give the base's model_type; the layer is LLaMA's anyway.
    found = to_llama_config(config | {"model_type": "llama"}, where)
    check_sizes((found.vocab_size, found.width), base)
    if found.n_layers != 1:
        raise HydrajaxError(f"{where}: num_hidden_layers: got {found.n_layers}, expected 1 in an EAGLE draft")
    expect(config, {"layer_types": (["full_attention"], None)}, where)
    for rope in (config, config.get("rope_parameters") or {}):
        expect(rope, {"partial_rotary_factor": (None, 1)}, where)
    # A draft has the base's context and no lm head to tie.
    return found.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head)


def layer_fields(layer: LlamaConfig) -> dict[str, Any]:
    """Return the fields of a one-layer LLaMA, the inverse of `read_layer`."""
    if layer != layer.plain_layer:
        raise cannot_write("config", layer, "LLaMA's plain layer")
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
    expect(flat, {"truncated_vocab_size": (flat.get("vocab_size"), None)})
    return flat


def check_class(drafter: Any, kind: type) -> None:
    """Refuse a drafter of another class, or with a prefix layer."""
    if type(drafter) is not kind:
        raise cannot_write("drafter", drafter_name(drafter), kind.__name__)


def check_all_tokens(drafter: Eagle) -> None:
    """Refuse a reduced vocabulary, for which no format of EAGLE-1 has a place."""
    if drafter.vocabulary is not None:
        raise cannot_write("vocabulary", f"{len(drafter.vocabulary)} tokens", f"all {drafter.config.vocab_size}")


def read_eagle_3(
    config: dict, layer: LlamaConfig, aux_hidden_layers: tuple[int, ...], files: TensorFiles, base: LlamaConfig
) -> Eagle3:
    """Return the draft; of a reduced vocabulary only the size is known, until `FeatureFormat.settled`."""
    expect(config, VARIANTS | {"target_hidden_size": (base.width, None)})
    check_copies(files, base, EMBEDDING)
    norm_before_residual = flag(config, "norm_before_residual", default=False)
    vocabulary = draft_vocabulary(config, files, base)
    return Eagle3(layer, aux_hidden_layers, vocabulary, norm_before_residual=norm_before_residual)


def draft_vocabulary(config: dict, files: TensorFiles, base: LlamaConfig) -> Vocabulary | None:
    """Return a vocabulary of the right size, None for all tokens; `read_vocabulary` returns its tokens."""
    size = base.vocab_size
    if config.get("draft_vocab_size") is not None:
        size = integer(config, "draft_vocab_size", 1)
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


def layers_read(drafter: Eagle3, made_for: MadeFor) -> tuple[list[int], int]:
    """Return the layers whose inputs are read, as vLLM counts, and the base's number of layers.

    An unknown number of layers is inferred if the draft reads the default ones of some base.
    """
    aux, n_layers = drafter.aux_hidden_layers, made_for.n_layers
    if n_layers is None:
        n_layers = next((n for n in range(1, max(aux) + 3) if default_aux_hidden_layers(n) == aux), None)
    if n_layers is None:
        raise cannot_write("aux_hidden_layers", f"{aux} of a base of unknown depth", "a base with a fingerprint")
    layers = [n_layers - from_last for from_last in aux]
    if min(aux) < 1 or layers[0] < 0 or layers != sorted(set(layers)):
        raise cannot_write("aux_hidden_layers", f"{aux} of {n_layers} layers", "inputs of its layers, in order")
    return layers, n_layers


def check(heads: EagleDrafter, base: LlamaConfig) -> None:
    """`Files.check`."""
    c: LlamaConfig = heads.config
    for name in ("depth", "ttt_length"):
        if not 1 <= getattr(heads, name) <= MOST:
            raise ValueError(f"{name}: got {getattr(heads, name)}, expected 1 to {MOST}")
    if c != c.plain_layer:
        raise ValueError(f"config: got {c}, expected LLaMA's plain layer")
    check_sizes((c.vocab_size, c.width), base)
    if max(c.mlp_width, c.n_heads * c.head_dim) > MOST * c.width:
        raise ValueError(f"config: got mlp_width {c.mlp_width} and {c.n_heads} heads of {c.head_dim}")
    if heads.vocabulary is not None and (last := int(heads.vocabulary.tokens[-1])) >= base.vocab_size:
        raise HydrajaxError(
            f"vocabulary: got token {last}, expected ids below {base.vocab_size}; the heads were made for another base"
        )
    if not isinstance(heads, Eagle3):
        return
    layers = heads.aux_hidden_layers
    if len(layers) > base.n_layers or not all(0 <= layer <= base.n_layers for layer in layers):
        raise HydrajaxError(
            f"aux_hidden_layers: got {list(layers)}, expected layers of this base, which has {base.n_layers}"
        )


def about(heads: EagleDrafter) -> About:
    c: LlamaConfig = heads.config
    rows = {
        "draft": f"one layer, up to {heads.depth} tokens ahead",
        "width, vocabulary": f"{c.width}, {c.vocab_size}",
    }
    if heads.vocabulary is not None or isinstance(heads, Eagle3):
        rows["draft vocabulary"] = str(heads.lm_head.size(c.vocab_size))
    if not isinstance(heads, Eagle3):
        return About("EAGLE heads", "eagle", rows)
    rows["reads"] = f"{len(heads.aux_hidden_layers)} layers of the base"
    return About("EAGLE-3 heads", "eagle3", rows)


EAGLE, EAGLE_3 = EagleFormat(), Eagle3Format()
EAGLE_FILES = Files((EAGLE,), check, about)
EAGLE_3_FILES = Files((EAGLE_3, VLLMEagle3(), Speculators()), check, about)
