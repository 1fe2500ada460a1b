"""The files of EAGLE drafts as their authors released them (SafeAILab/EAGLE): read, and not written yet.

A directory holds ``config.json``, which is that of a LLaMA of one layer, and ``pytorch_model.bin`` or
``model.safetensors``. EAGLE-1 (and 2, whose weights are of the same kind) names its tensors ``fc.*`` and
``layers.0.*``, the first layer being without ``input_layernorm``. EAGLE-3 names them ``fc.weight``, ``midlayer.*``,
``norm.weight`` and ``lm_head.weight``; ``d2t`` says of the i-th token that it can guess how far its id lies above i.
The files may hold a copy of the base's embedding, which is not read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3, reads_of
from hydrajax.drafters.formats import HeadFormat, integer
from hydrajax.drafters.heads_files import check_sizes
from hydrajax.drafters.lm_head import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.families.family import decoder_layer
from hydrajax.families.registry import to_llama_config
from hydrajax.models.config import LlamaConfig
from hydrajax.models.layout import MODEL, same, transposed

EMBEDDING = "embed_tokens.weight"
IGNORED = r"embed_tokens\.weight|.*rotary_emb\.inv_freq"
OFFSETS = "d2t"
INTEGERS = ("I64", "I32", "int64", "int32")  # as safetensors and as torch call them


class EagleFormat(HeadFormat):
    """EAGLE-1 and 2."""

    name = "eagle"
    stem = MODEL
    known_by = "released EAGLE (fc. and layers.0.)"
    ignored = IGNORED
    layer = "layers.0."  # how the names of the decoder layer's tensors begin

    def recognises(self, config, names):
        # vLLM's own EAGLE directories have another config.json.
        return config.get("model_type") != "eagle" and any(name.startswith(self.layer) for name in names)

    def drafter(self, config, files, base):
        bias = config.get("bias", True)
        if not isinstance(bias, bool):
            raise HydrajaxError(f"config.json: bias must be true or false, found {bias!r}")
        if EMBEDDING in files:
            check_sizes(files.shape(EMBEDDING), base)
        return Eagle(layer_of(config, base), fc_bias=bias)

    def layout(self, drafter, config):
        layer, width = drafter.config, drafter.config.width
        bias = [same(("fc_bias",), "fc.bias", width)] if drafter.fc_bias else []
        fc = transposed(("fc",), "fc.weight", width, 2 * width)
        return [fc, *bias, *decoder_layer(("layer",), self.layer, layer, attends_from=width)]

    def settled(self, drafter, files, dtype):
        own = files.dtype("fc.weight") if dtype is None else dtype
        return dataclasses.replace(drafter, dtype=jnp.dtype(own))


class Eagle3Format(HeadFormat):
    """EAGLE-3."""

    name = "eagle-3"
    stem = MODEL
    known_by = "released EAGLE-3 (fc. and midlayer.)"
    ignored = rf"{IGNORED}|{OFFSETS}|t2d"
    layer = "midlayer."

    def recognises(self, config, names):
        return any(name.startswith(self.layer) for name in names)

    def drafter(self, config, files, base):
        layer, reads = layer_of(config, base), reads_of(base.n_layers)
        if len(reads) < 3 or base.n_layers < 3:
            raise HydrajaxError(
                "EAGLE-3 reads the inputs of the base's layers 2, L // 2 and L - 3, which are three in a base of 3 "
                f"layers or of at least 7; this one has {base.n_layers}"
            )
        n_known = integer(config, "draft_vocab_size", 1) if "draft_vocab_size" in config else base.vocab_size
        if n_known > base.vocab_size:
            raise HydrajaxError(f"config.json: draft_vocab_size {n_known} exceeds the base's {base.vocab_size} tokens")
        if n_known == base.vocab_size:
            return Eagle3(layer, reads)
        if OFFSETS not in files:
            raise HydrajaxError(f"missing tensor '{OFFSETS}', which says what tokens the {n_known} are")
        if files.shape(OFFSETS) != (n_known,) or files.dtype(OFFSETS) not in INTEGERS:
            found = f"{files.dtype(OFFSETS)} {list(files.shape(OFFSETS))}"
            raise HydrajaxError(f"{OFFSETS} must be int64 [{n_known}] (draft_vocab_size of config.json), found {found}")
        return Eagle3(layer, reads, Vocabulary(range(n_known)))  # how many they are; `settled` says which

    def layout(self, drafter, config):
        layer, width = drafter.config, drafter.config.width
        return [
            transposed(("fc",), "fc.weight", width, len(drafter.reads) * width),
            same(("embedding_norm", "scale"), f"{self.layer}input_layernorm.weight", width),
            same(("hidden_norm", "scale"), f"{self.layer}hidden_norm.weight", width),
            *decoder_layer(("layer",), self.layer, layer, attends_from=2 * width),
            same(("norm", "scale"), "norm.weight", width),
            transposed(("lm_kernel",), "lm_head.weight", drafter.lm_head.size(layer.vocab_size), width),
        ]

    def settled(self, drafter, files, dtype):
        own = files.dtype("fc.weight") if dtype is None else dtype
        vocabulary, most = drafter.vocabulary, drafter.config.vocab_size
        if vocabulary is not None:
            tokens = np.arange(len(vocabulary)) + files.read(OFFSETS)
            if tokens[0] < 0 or tokens[-1] >= most or (np.diff(tokens) <= 0).any():
                raise HydrajaxError(f"{OFFSETS}: the tokens that it tells of must rise, from 0 up and below {most}")
            vocabulary = Vocabulary(tokens.tolist())
        return dataclasses.replace(drafter, vocabulary=vocabulary, dtype=jnp.dtype(own))


def layer_of(config: dict[str, Any], base: LlamaConfig) -> LlamaConfig:
    """The draft's decoder layer, as ``config.json`` describes it. Raises `HydrajaxError` where it does not fit."""
    # The layer is a LLaMA's whatever family the base is of, which some files name here.
    found = to_llama_config(config | {"model_type": "llama"})
    check_sizes((found.vocab_size, found.width), base)
    if found.n_layers != 1:
        raise HydrajaxError(f"config.json: num_hidden_layers is {found.n_layers}, supported is 1 in an EAGLE draft")
    return found.replace(max_positions=base.max_positions)


EAGLE, EAGLE_3 = EagleFormat(), Eagle3Format()
