"""Files of drafts of one pass: as released by z-lab (DFlash), JetSpec and DeepSpec (DSpark and its variant of DFlash).

A released directory holds ``config.json`` of a small Qwen 3 and ``model.safetensors`` with ``fc.weight``,
``hidden_norm.weight``, ``layers.N.*`` and ``norm.weight``:

- DFlash and JetSpec have a ``dflash_config`` with ``target_layer_ids`` and ``mask_token_id``; JetSpec's also has
  ``causal_head``. They use the base's embedding and lm head.
- DeepSpec has these fields at the top level, and ``markov_head.*`` and ``confidence_head.*`` if the config asks for
  them. Its slots predict the next position. It adds frozen copies of the base's embedding and lm head, which are not
  read and not written.

speculators (vllm-project/speculators) has ``speculators_model_type`` ``dflash`` or ``dspark``, the layers as
``transformer_layer_config``, and a reduced vocabulary as ``d2t`` and ``t2d``, whose rows of the lm head are copies too.
``sample_from_anchor`` means that slots predict the next position. Its ``aux_hidden_state_layer_ids`` number the layers
whose *input* is read.

In layers with a sliding window a slot sees only earlier slots of its block, and the window ends at its own position, as
in SpecForge and vLLM.

Muse Glimmer's assistant (transformers' ``muse_glimmer_assistant``) has DFlash's layers under other names and all fields
at the top level. A window of W reaches W tokens back and W slots ahead. Slots are embedded without the base's norm of
embeddings, and guesses are the lm head's matmul, without the base's multiplier and cap.

Layer i of ``target_layer_ids`` is the base's layer whose *output* is read. The last layer's is after the final norm in
transformers, which DeepSpec therefore refuses; -1 is the embedding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from hydrajax.drafters.block import BlockDrafter, default_target_layers, from_last
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.dspark import DSpark
from hydrajax.drafters.markov import KINDS, MarkovHead
from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import rope_parameters
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.formats.eagle_format import ONE_PASS
from hydrajax.formats.eagle_parts import KIND, draft_vocabulary, nested_layer, with_vocabulary
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
from hydrajax.models.layout import MODEL, Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FUSION = "fc.weight", "hidden_norm.weight"
NESTED = "dflash_config"
LARGEST_BLOCK = 1024
ASSISTANT = "muse_glimmer_assistant"
ASSISTANT_DEFAULTS = {  # transformers'
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201_818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
LISTS = ("layer_types", "target_layer_ids")  # whose null is the default
SLIDING = "sliding_attention"
VARIANTS = {  # of DFlash, which are not implemented
    "projector_type": (None, "dflash"),
    "use_swa": (None, False),
    "shift_label": (None, False),
    "final_logit_softcapping": (None,),
    "output_multiplier": (None, 1),
    "attention_value_scale": (None, 1),
    "pure_draft_prefix_len": (None, 0),
}
OTHERS = ("Gemma", "DFlash2")  # beginnings of architectures that are not implemented


class BlockFormat(HeadFormat):
    """A format of drafts of one pass.

    Attributes:
        drafter_class: The class of its drafters.
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
        return dataclasses.replace(drafter, dtype=jnp.dtype(files.dtype(self.fusion[0]) if dtype is None else dtype))

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
        if not drafter.config.qk_norm:
            raise cannot_write("config", drafter.config, "the layers of Qwen 3")
        layers = [made_for.n_layers - 1 - from_end for from_end in drafter.aux_hidden_layers]
        most = made_for.n_layers - (1 if self.last_is_normed else 2)
        if not all(self.first_layer <= layer <= most for layer in layers):
            raise cannot_write("target_layer_ids", layers, f"numbers from {self.first_layer} to {most}")
        fields = from_llama_config(drafter.config.replace(tied_lm_head=False), CONFIG)
        fields |= {"block_size": drafter.block_size, "num_target_layers": made_for.n_layers}
        if sizes := sorted(set(drafter.windows) - {0}):
            if len(sizes) > 1:
                raise cannot_write("windows", list(drafter.windows), "one size of window")
            fields["layer_types"] = [SLIDING if window else "full_attention" for window in drafter.windows]
            fields |= {"sliding_window": sizes[0], "use_sliding_window": True}
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
        if not isinstance(own, dict) or KIND in config:
            return False
        causal = own.get("causal_head"), own.get("causal"), config.get("is_causal")
        return (True in causal) is self.causal

    def drafter(self, config, files, base):
        own, where = config[NESTED], f"{CONFIG}: {NESTED}"
        expect(own, VARIANTS, where)
        layers, windows = read_layers(config, base)
        if windows and False in (own.get("causal"), config.get("is_causal")):
            raise HydrajaxError(f"{CONFIG}: is_causal: got false, expected true with sliding windows")
        check_copies(files, base, EMBEDDING, LM_HEAD)
        numbers = own.get("target_layer_ids")
        if numbers is None:
            numbers = list(default_target_layers(base.n_layers, layers.n_layers))
        aux_hidden_layers = self.reads(numbers, base, f"{NESTED}.target_layer_ids")
        size = block_size_of(own if "block_size" in own else config, 2)
        return self.drafter_class(layers, aux_hidden_layers, mask_of(own, base, where), size, windows=windows)

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        if drafter.both_ways or drafter.plain_logits:
            raise cannot_write("both_ways or plain_logits", True, False)
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


class MuseAssistantFormat(BlockFormat):
    """Muse Glimmer's assistant, a DFlash draft (transformers' ``muse_glimmer_assistant``)."""

    name = "muse-assistant"
    known_by = "Muse Glimmer's assistant (model_type 'muse_glimmer_assistant')"
    read_by = '`hydrajax generate --base BASE --draft THIS`, and transformers (`speculation_type="dflash"`).'
    drafter_class = DFlash
    first_layer = -1
    fusion = "encoder.fc.weight", "encoder.output_norm_enc.weight"

    def recognises(self, config, names):
        return config.get("model_type") == ASSISTANT

    def drafter(self, config, files, base):
        given = {name: value for name, value in config.items() if value is not None or name not in LISTS}
        fields = ASSISTANT_DEFAULTS | given | {"vocab_size": base.vocab_size}
        n_layers = min(integer(fields, "num_hidden_layers", 1), MOST + 1)
        layers, windows = read_layers({"layer_types": [SLIDING] * n_layers} | fields, base)
        return DFlash(
            layers,
            self.reads(fields["target_layer_ids"], base, "target_layer_ids"),
            mask_of(fields, base, CONFIG),
            block_size_of(fields, 2),
            windows=tuple(window + 1 if window else 0 for window in windows),
            both_ways=True,
            plain_logits=True,
        )

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        for name in ("both_ways", "plain_logits"):
            if not getattr(drafter, name):
                raise cannot_write(name, False, True)
        own = {name: fields[name] for name in fields.keys() & ASSISTANT_DEFAULTS.keys() - {"rope_theta"}}
        return own | {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": ASSISTANT,
            "rope_parameters": rope_parameters(drafter.config.rope_theta, drafter.config.rope_scaling),
            "layer_types": fields.get("layer_types", ["full_attention"] * drafter.config.n_layers),
            "sliding_window": max(drafter.windows) - 1 if any(drafter.windows) else 2048,
            "mask_token_id": drafter.mask_token,
            "target_layer_ids": layers,
        }


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
        layers, windows = read_layers(config, base)
        check_copies(files, base, EMBEDDING, LM_HEAD)
        aux_hidden_layers = self.reads(config["target_layer_ids"], base, "target_layer_ids")
        size, mask = block_size_of(config, 1), mask_of(config, base, CONFIG)
        return DSpark(layers, aux_hidden_layers, mask, size, **read_heads(config), windows=windows)

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
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


class SpeculatorsBlocks(BlockFormat):
    """DFlash and DSpark of vllm-project/speculators. Read only."""

    name = "speculators-one-pass"
    known_by = "DFlash or DSpark of speculators (speculators_model_type 'dflash' or 'dspark')"
    ignored = BlockFormat.ignored + "|d2t|t2d"

    def recognises(self, config, names):
        return config.get(KIND) in ONE_PASS

    def drafter(self, config, files, base):
        kind = config[KIND]
        refuse_quantized(config)
        layers, windows = read_layers(nested_layer(config), base)
        if windows:
            expect(config, {"sliding_window_non_causal": (None, False)})
        numbers = config.get("aux_hidden_state_layer_ids")
        outputs = [number - 1 for number in numbers] if is_integers(numbers) else numbers
        try:
            aux_hidden_layers = self.reads(outputs, base, "")
        except HydrajaxError:
            raise HydrajaxError(
                f"{CONFIG}: aux_hidden_state_layer_ids: got {numbers!r}, expected numbers from 0 to "
                f"{base.n_layers - 1} for this base of {base.n_layers} layers"
            ) from None
        check_copies(files, base, EMBEDDING)
        common = {
            "mask_token": mask_of(config, base, CONFIG),
            "block_size": block_size_of(config, 2),
            "vocabulary": draft_vocabulary(config, files, base),
            "windows": windows,
        }
        if flag(config, "sample_from_anchor", default=kind == "dspark"):
            return DSpark(layers, aux_hidden_layers, **common, **(read_heads(config) if kind == "dspark" else {}))
        if kind == "dspark":
            raise HydrajaxError(f"{CONFIG}: sample_from_anchor: got false, expected true for dspark")
        return DFlash(layers, aux_hidden_layers, **common)

    def settled(self, drafter, files, dtype):
        return with_vocabulary(super().settled(drafter, files, dtype), files)

    first_layer = -1
    last_is_normed = False


def is_integers(numbers: Any) -> bool:
    """Return whether this is a list of integers."""
    return isinstance(numbers, list) and all(type(x) is int for x in numbers)


def read_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields ``markov`` and ``confidence_head`` of `DSpark`."""
    rank, markov, confidence = integer(config, "markov_rank", 0), None, None
    if rank:
        kind = config.get("markov_head_type", "vanilla")
        if kind not in KINDS:
            raise HydrajaxError(f"{CONFIG}: markov_head_type: got {kind!r}, expected one of {', '.join(KINDS)}")
        markov = MarkovHead(rank, kind)
    if flag(config, "enable_confidence_head", default=False):
        confidence = "markov" if flag(config, "confidence_head_with_markov", default=False) else "hidden"
        if confidence == "markov" and markov is None:
            raise HydrajaxError(f"{CONFIG}: confidence_head_with_markov: got true, expected false: no Markov head")
    return {"markov": markov, "confidence_head": confidence}


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
    refuse_quantized(config)
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if str(name).startswith(OTHERS):
            raise HydrajaxError(f"{CONFIG}: architectures: got {name!r}, expected the layers of Qwen 3")
    hidden = {"sliding_window": None, "use_sliding_window": False, "layer_types": None, "model_type": "qwen3"}
    found = to_llama_config(config | hidden, CONFIG)
    check_sizes((found.vocab_size, found.width), base)
    depth = config.get("num_target_layers")
    if depth is not None and depth != base.n_layers:
        raise HydrajaxError(
            f"num_target_layers: got {depth}, expected {base.n_layers}; the heads were made for another base"
        )
    if found.n_layers > MOST:
        raise HydrajaxError(f"{CONFIG}: num_hidden_layers: got {found.n_layers}, expected at most {MOST}")
    # A draft has the base's context.
    layers = found.replace(max_positions=base.max_positions, tied_lm_head=base.tied_lm_head)
    return layers, read_windows(config, found.n_layers)


def read_windows(config: dict[str, Any], n_layers: int) -> tuple[int, ...]:
    """Return the sliding windows, none as an empty tuple."""
    types = config.get("layer_types")
    if types is None:
        switched = config.get("use_sliding_window") is True
        first = integer(config, "max_window_layers", 0, n_layers) if switched else n_layers
        types = ["full_attention" if i < first else SLIDING for i in range(n_layers)]
    known = ("full_attention", SLIDING)
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
        raise HydrajaxError(
            f"{CONFIG}: layer_types: got {str(types)[:80]}, expected full_attention or {SLIDING} for each of "
            f"{n_layers} layers"
        )
    if SLIDING not in types:
        return ()
    window = integer(config, "sliding_window", 1)
    return tuple(window if kind == SLIDING else 0 for kind in types)


def block_size_of(config: dict[str, Any], least: int) -> int:
    """Return the field ``block_size``."""
    size = integer(config, "block_size", least)
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


DFLASH_FILES = Files((DFlashFormat(), MuseAssistantFormat(), SpeculatorsBlocks()), check, about)
JETSPEC_FILES = Files((JetSpecFormat(),), check, about)
DSPARK_FILES = Files((DeepSpecFormat(),), check, about)
