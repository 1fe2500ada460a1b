"""Parts that files of drafts of one pass share: the layers, their key map, and checks."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from hydrajax.drafters.block import BlockDrafter, from_last
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.formats import interface
from hydrajax.formats.eagle_parts import (
    check_all_tokens,
    check_aux_layers,
    check_class,
    check_vocabulary,
    with_vocabulary,
)
from hydrajax.formats.interface import CONFIG
from hydrajax.models.layout import MODEL, Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

FUSION = "fc.weight", "hidden_norm.weight"
LARGEST_BLOCK = 1024
SLIDING = "sliding_attention"
OTHERS = ("Gemma", "DFlash2")  # beginnings of architectures that are not implemented


class BlockFormat(interface.HeadFormat):
    """A format of drafts of one pass.

    Attributes:
        first_layer: The smallest allowed number in ``target_layer_ids``.
        last_is_normed: The last layer of the base is allowed.
        fusion: Names of the tensors that fuse the base's hidden states.
    """

    stem = MODEL
    ignored = r"embed_tokens\.weight|lm_head\.weight|.*rotary_emb\.inv_freq"
    dtype_field = "dtype"
    drafter_class: type[BlockDrafter]
    first_layer = 0
    last_is_normed = True
    fusion = FUSION

    def layout(self, drafter, config):
        return block_layout(drafter, *self.fusion)

    def settled(self, drafter, files, dtype):
        dtype = jnp.dtype(files.dtype(self.fusion[0]) if dtype is None else dtype)
        return with_vocabulary(dataclasses.replace(drafter, dtype=dtype), files)

    def reads(self, numbers: Any, base: LlamaConfig, where: str, offset: int = 0) -> tuple[int, ...]:
        """Return ``aux_hidden_layers`` of the numbers of layers in field ``where``, ``offset`` higher than here."""
        least, most = self.first_layer + offset, base.n_layers - (1 if self.last_is_normed else 2) + offset
        good = isinstance(numbers, list) and numbers and len(numbers) <= interface.MOST
        if not good or not all(type(x) is int and least <= x <= most for x in numbers):
            raise HydrajaxError(
                f"{CONFIG}: {where}: got {numbers!r}, expected numbers from {least} to {most} for this base of "
                f"{base.n_layers} layers"
            )
        return tuple(from_last(layer - offset, base.n_layers) for layer in numbers)

    def common_fields(self, drafter: BlockDrafter, made_for: interface.MadeFor) -> tuple[dict[str, Any], list[int]]:
        """Return the fields that all formats have, and ``target_layer_ids``."""
        check_class(drafter, self.drafter_class)
        check_all_tokens(drafter)
        if made_for.n_layers is None:
            raise interface.cannot_write("base", "unknown depth", "a base with a fingerprint")
        if not drafter.config.qk_norm:
            raise interface.cannot_write("config", drafter.config, "the layers of Qwen 3")
        layers = [made_for.n_layers - 1 - from_end for from_end in drafter.aux_hidden_layers]
        most = made_for.n_layers - (1 if self.last_is_normed else 2)
        if not all(self.first_layer <= layer <= most for layer in layers):
            raise interface.cannot_write("target_layer_ids", layers, f"numbers from {self.first_layer} to {most}")
        fields = from_llama_config(drafter.config.replace(tied_lm_head=False), CONFIG)
        fields |= {"block_size": drafter.block_size, "num_target_layers": made_for.n_layers}
        if sizes := sorted(set(drafter.windows) - {0}):
            if len(sizes) > 1:
                raise interface.cannot_write("windows", list(drafter.windows), "one size of window")
            fields["layer_types"] = [SLIDING if window else "full_attention" for window in drafter.windows]
            fields |= {"sliding_window": sizes[0], "use_sliding_window": True}
        return fields, layers


def block_layout(drafter: BlockDrafter, fc: str = FUSION[0], hidden_norm: str = FUSION[1]) -> Layout:
    """Return the key map of a draft of one pass, the same in all formats except for the names of these two tensors."""
    c, width = drafter.config, drafter.config.width
    layout = [
        transposed(("fc",), fc, width, len(drafter.aux_hidden_layers) * width),
        same(("hidden_norm", "scale"), hidden_norm, width),
        same(("norm", "scale"), "norm.weight", width),
    ]
    for i in range(c.n_layers):
        layout += decoder_layer((f"layers_{i}",), f"layers.{i}.", c)
    if markov := drafter.markov:
        path, name, rank = "markov_head", "markov_head.", markov.rank
        layout += [
            same((path, "embedding"), f"{name}markov_w1.weight", c.vocab_size, rank),
            transposed((path, "out"), f"{name}markov_w2.weight", drafter.lm_head.size(c.vocab_size), rank),
        ]
        inner = {"gated": ("gate_proj", rank, width + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + width)}
        if markov.kind in inner:
            part, outputs, inputs = inner[markov.kind]
            layout.append(transposed((path, "kernel"), f"{name}{part}.weight", outputs, inputs))
            layout.append(same((path, "bias"), f"{name}{part}.bias", outputs))
    if drafter.confidence_head is not None:
        inputs = width + (drafter.markov.rank if drafter.confidence_head == "markov" else 0)
        layout.append(transposed(("confidence_kernel",), "confidence_head.proj.weight", 1, inputs))
        layout.append(same(("confidence_bias",), "confidence_head.proj.bias", 1))
    return layout


def read_layers(config: dict[str, Any], base: LlamaConfig) -> tuple[LlamaConfig, tuple[int, ...]]:
    """Return the draft's layers, and their sliding windows (`BlockDrafter.windows`).

    The layers are those of Qwen 3 whatever the file's ``model_type``.
    """
    interface.refuse_quantized(config)
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if str(name).startswith(OTHERS):
            raise HydrajaxError(f"{CONFIG}: architectures: got {name!r}, expected the layers of Qwen 3")
    hidden = {"sliding_window": None, "use_sliding_window": False, "layer_types": None, "model_type": "qwen3"}
    found = to_llama_config(config | hidden, CONFIG)
    interface.check_sizes((found.vocab_size, found.width), base)
    depth = config.get("num_target_layers")
    if depth is not None and depth != base.n_layers:
        raise HydrajaxError(
            f"num_target_layers: got {depth}, expected {base.n_layers}; the heads were made for another base"
        )
    if found.n_layers > interface.MOST:
        raise HydrajaxError(f"{CONFIG}: num_hidden_layers: got {found.n_layers}, expected at most {interface.MOST}")
    # A draft has the base's context.
    layers = found.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head)
    return layers, read_windows(config, found.n_layers)


def read_windows(config: dict[str, Any], n_layers: int) -> tuple[int, ...]:
    """Return the sliding windows, none as an empty tuple."""
    types = config.get("layer_types")
    if types is None:
        switched = config.get("use_sliding_window") is True
        first = interface.integer(config, "max_window_layers", 0, n_layers) if switched else n_layers
        types = ["full_attention" if i < first else SLIDING for i in range(n_layers)]
    known = ("full_attention", SLIDING)
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
        raise HydrajaxError(
            f"{CONFIG}: layer_types: got {str(types)[:80]}, expected full_attention or {SLIDING} for each of "
            f"{n_layers} layers"
        )
    if SLIDING not in types:
        return ()
    window = interface.integer(config, "sliding_window", 1)
    return tuple(window if kind == SLIDING else 0 for kind in types)


def block_size_of(config: dict[str, Any], least: int) -> int:
    """Return the field ``block_size``."""
    size = interface.integer(config, "block_size", least)
    if size > LARGEST_BLOCK:
        raise HydrajaxError(f"{CONFIG}: block_size: got {size}, expected at most {LARGEST_BLOCK}")
    return size


def mask_of(fields: dict[str, Any], base: LlamaConfig, where: str) -> int:
    """Return the mask token's id."""
    token = fields.get("mask_token_id")
    if type(token) is not int or not 0 <= token < base.vocab_size:
        raise HydrajaxError(
            f"{where}: mask_token_id: got {token!r}, expected a token of the base's vocabulary of {base.vocab_size}"
        )
    return token


def check(heads: BlockDrafter, base: LlamaConfig) -> None:
    """`Files.check`."""
    c = heads.config
    if not 1 <= heads.block_size <= LARGEST_BLOCK:
        raise ValueError(f"block_size: got {heads.block_size}, expected 1 to {LARGEST_BLOCK}")
    if c.n_layers > interface.MOST:
        raise ValueError(f"config: got {c.n_layers} layers, expected at most {interface.MOST}")
    interface.check_sizes((c.vocab_size, c.width), base)
    interface.check_layer(c)
    check_vocabulary(heads, base)
    check_aux_layers(heads, base)


def about(heads: BlockDrafter) -> interface.About:
    c = heads.config
    rows = {
        "draft": f"one pass of {c.n_layers} layers, {heads.depth} tokens ahead",
        "width, vocabulary": f"{c.width}, {heads.lm_head.size(c.vocab_size)}",
        "reads": f"{len(heads.aux_hidden_layers)} layers of the base",
    }
    if heads.markov is not None:
        rows["Markov head"] = f"{heads.markov.kind}, rank {heads.markov.rank}"
    name = type(heads).__name__
    return interface.About(f"{name} draft", name.lower(), rows)
