"""Files of drafts of one pass: as released by z-lab (DFlash), JetSpec and DeepSpec (DSpark and its variant of DFlash).

A released directory holds ``config.json`` of a small Qwen 3 and ``model.safetensors`` with ``fc.weight``,
``hidden_norm.weight``, ``layers.N.*`` and ``norm.weight``:

- DFlash and JetSpec have a ``dflash_config`` with ``target_layer_ids`` and ``mask_token_id``; JetSpec's also has
  ``causal_head``. They use the base's embedding and lm head.
- DeepSpec has these fields at the top level, and ``markov_head.*`` and ``confidence_head.*`` if the config asks for
  them. Its slots predict the next position. It adds frozen copies of the base's embedding and lm head, which are not
  read and not written.

Layer i of ``target_layer_ids`` is the base's layer whose *output* is read. The last layer's is after the final norm in
transformers, which DeepSpec therefore refuses; -1 is the embedding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from hydrajax.drafters.block import BlockDrafter, from_last
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.dspark import DSpark
from hydrajax.drafters.markov import KINDS, MarkovHead
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
)
from hydrajax.models.layout import MODEL, Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
NESTED = "dflash_config"
OFF = (None, False)


class BlockFormat(HeadFormat):
    """A format of drafts of one pass.

    Attributes:
        drafter_class: The class of its drafters.
        first_layer: The smallest allowed number in ``target_layer_ids``.
        last_is_normed: The last layer of the base is allowed.
    """

    stem = MODEL
    ignored = r"embed_tokens\.weight|lm_head\.weight|.*rotary_emb\.inv_freq"
    dtype_field = "dtype"
    drafter_class: type[BlockDrafter]
    first_layer = 0
    last_is_normed = True

    def layout(self, drafter, config):
        return block_layout(drafter)

    def settled(self, drafter, files, dtype):
        return dataclasses.replace(drafter, dtype=jnp.dtype(files.dtype("fc.weight") if dtype is None else dtype))

    def reads(self, numbers: Any, base: LlamaConfig, where: str) -> tuple[int, ...]:
        """Return ``aux_hidden_layers`` of ``target_layer_ids``."""
        most = base.n_layers - (1 if self.last_is_normed else 2)
        good = isinstance(numbers, list) and numbers and len(numbers) <= MOST
        if not good or not all(type(x) is int and self.first_layer <= x <= most for x in numbers):
            raise HydrajaxError(
                f"{CONFIG}: {where}: got {numbers!r}, expected numbers from {self.first_layer} to {most} for this base "
                f"of {base.n_layers} layers"
            )
        return tuple(from_last(layer, base.n_layers) for layer in numbers)

    def common_fields(self, drafter: BlockDrafter, made_for: MadeFor) -> tuple[dict[str, Any], list[int]]:
        """Return the fields that all formats have, and ``target_layer_ids``."""
        if type(drafter) is not self.drafter_class:
            raise cannot_write("drafter", drafter_name(drafter), self.drafter_class.__name__)
        if drafter.vocabulary is not None:
            raise cannot_write("vocabulary", f"{len(drafter.vocabulary)} tokens", f"all {drafter.config.vocab_size}")
        if made_for.n_layers is None:
            raise cannot_write("base", "unknown depth", "a base with a fingerprint")
        layers = [made_for.n_layers - 1 - from_end for from_end in drafter.aux_hidden_layers]
        fields = from_llama_config(drafter.config.replace(tied_lm_head=False), CONFIG)
        fields |= {"block_size": drafter.block_size, "num_target_layers": made_for.n_layers}
        return fields, layers


class DFlashFormat(BlockFormat):
    """DFlash of z-lab/dflash."""

    name = "dflash"
    known_by = "DFlash (dflash_config)"
    read_by = "`hydrajax generate --base BASE --draft THIS`, and the official code of DFlash, SGLang and vLLM."
    drafter_class = DFlash
    causal = False
    architecture = "DFlashDraftModel"

    def recognises(self, config, names):
        own = config.get(NESTED)
        return isinstance(own, dict) and (own.get("causal_head") is True) is self.causal

    def drafter(self, config, files, base):
        own, where = config[NESTED], f"{CONFIG}: {NESTED}"
        flag(own, "causal_head", default=False)
        expect(own, {"draft_shift": (None, False, 0)}, where)
        layer = read_layers(config, base)
        check_copies(files, base, EMBEDDING, LM_HEAD)
        aux_hidden_layers = self.reads(own.get("target_layer_ids"), base, f"{NESTED}.target_layer_ids")
        return self.drafter_class(layer, aux_hidden_layers, mask_of(own, base, where), integer(config, "block_size", 2))

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        own = {"mask_token_id": drafter.mask_token, "target_layer_ids": layers}
        own |= {"causal_head": True} if self.causal else {}
        return fields | {"architectures": [self.architecture], NESTED: own}


class JetSpecFormat(DFlashFormat):
    """JetSpec of hao-ai-lab/JetSpec: DFlash's layout with a causal mask."""

    name = "jetspec"
    known_by = "JetSpec (dflash_config.causal_head)"
    read_by = "`hydrajax generate --base BASE --draft THIS --tree fanout-64-7`, and the official code of JetSpec."
    drafter_class = JetSpec
    causal = True


class DeepSpecFormat(BlockFormat):
    """DSpark, and the variant of DFlash, of deepseek-ai/DeepSpec."""

    name = "deepspec"
    known_by = "DeepSpec (target_layer_ids and markov_rank)"
    read_by = "`hydrajax generate --base BASE --draft THIS`."
    drafter_class = DSpark
    first_layer = -1
    last_is_normed = False

    def recognises(self, config, names):
        return "target_layer_ids" in config and "markov_rank" in config

    def drafter(self, config, files, base):
        layer = read_layers(config, base)
        check_copies(files, base, EMBEDDING, LM_HEAD)
        aux_hidden_layers = self.reads(config["target_layer_ids"], base, "target_layer_ids")
        rank = integer(config, "markov_rank", 0)
        markov = None
        if rank:
            kind = config.get("markov_head_type", "vanilla")
            if kind not in KINDS:
                raise HydrajaxError(f"{CONFIG}: markov_head_type: got {kind!r}, expected one of {', '.join(KINDS)}")
            markov = MarkovHead(rank, kind)
        confidence = None
        if flag(config, "enable_confidence_head", default=False):
            with_markov = flag(config, "confidence_head_with_markov", default=False)
            if with_markov and markov is None:
                raise HydrajaxError(f"{CONFIG}: confidence_head_with_markov: got true, expected false: no Markov head")
            confidence = "markov" if with_markov else "hidden"
        size = integer(config, "block_size", 1)
        return DSpark(layer, aux_hidden_layers, mask_of(config, base, CONFIG), size, markov, confidence)

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        if drafter.own_lm_head:
            raise cannot_write("own_lm_head", True, False)
        markov = drafter.markov
        return fields | {
            "architectures": ["Qwen3DSparkModel"],
            "target_layer_ids": layers,
            "mask_token_id": drafter.mask_token,
            "markov_rank": markov.rank if markov else 0,
            "markov_head_type": markov.kind if markov else "vanilla",
            "enable_confidence_head": drafter.confidence_head is not None,
            "confidence_head_with_markov": drafter.confidence_head == "markov",
            "num_anchors": drafter.num_anchors,
        }


def block_layout(drafter: BlockDrafter) -> Layout:
    """Return the key map of a draft of one pass, the same in all formats."""
    c, width = drafter.config, drafter.config.width
    layout = [
        transposed(("fc",), "fc.weight", width, len(drafter.aux_hidden_layers) * width),
        same(("hidden_norm", "scale"), "hidden_norm.weight", width),
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


def read_layers(config: dict[str, Any], base: LlamaConfig) -> LlamaConfig:
    """Return the draft's layers, from a ``config.json`` that also names the base's depth."""
    found = to_llama_config(config, CONFIG)
    check_sizes((found.vocab_size, found.width), base)
    depth = integer(config, "num_target_layers", 1, base.n_layers)
    if depth != base.n_layers:
        raise HydrajaxError(
            f"num_target_layers: got {depth}, expected {base.n_layers}; the heads were made for another base"
        )
    if found.n_layers > MOST:
        raise HydrajaxError(f"{CONFIG}: num_hidden_layers: got {found.n_layers}, expected at most {MOST}")
    if found.sliding_window is not None or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise HydrajaxError(f"{CONFIG}: layer_types: got a sliding window, expected full_attention in every layer")
    # A draft has the base's context.
    return found.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head)


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
    if not 1 <= heads.block_size <= 16 * MOST:
        raise ValueError(f"block_size: got {heads.block_size}, expected 1 to {16 * MOST}")
    if c.n_layers > MOST:
        raise ValueError(f"config: got {c.n_layers} layers, expected at most {MOST}")
    check_sizes((c.vocab_size, c.width), base)
    if max(c.mlp_width, c.n_heads * c.head_dim) > MOST * c.width:
        raise ValueError(f"config: got mlp_width {c.mlp_width} and {c.n_heads} heads of {c.head_dim}")
    if heads.vocabulary is not None and (last := int(heads.vocabulary.tokens[-1])) >= base.vocab_size:
        raise HydrajaxError(
            f"vocabulary: got token {last}, expected ids below {base.vocab_size}; the heads were made for another base"
        )
    layers = heads.aux_hidden_layers
    if not 1 <= len(layers) <= MOST or not all(0 <= layer <= base.n_layers for layer in layers):
        raise HydrajaxError(
            f"aux_hidden_layers: got {list(layers)}, expected layers of this base, which has {base.n_layers}"
        )


def about(heads: BlockDrafter) -> About:
    c = heads.config
    rows = {
        "draft": f"one pass of {c.n_layers} layers, {heads.depth} tokens ahead",
        "width, vocabulary": f"{c.width}, {heads.lm_head.size(c.vocab_size)}",
        "reads": f"{len(heads.aux_hidden_layers)} layers of the base",
    }
    if heads.markov is not None:
        rows["Markov head"] = f"{heads.markov.kind}, rank {heads.markov.rank}"
    name = type(heads).__name__
    return About(f"{name} draft", name.lower(), rows)


DFLASH_FILES = Files((DFlashFormat(),), check, about)
JETSPEC_FILES = Files((JetSpecFormat(),), check, about)
DSPARK_FILES = Files((DeepSpecFormat(),), check, about)
