"""Files of Gemma 4's assistant (`hydrajax.drafters.gemma4_assistant`), as transformers reads and writes them.

``config.json`` has the layers' settings in ``text_config``. The lm head is the embedding of the same file, which
nothing else reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from hydrajax.drafters.gemma4_assistant import Gemma4Assistant
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.formats.eagle_parts import check_all_tokens, check_class, check_vocabulary
from hydrajax.formats.interface import (
    CONFIG,
    MOST,
    About,
    Files,
    HeadFormat,
    MadeFor,
    check_sizes,
    expect,
    integer,
    refuse_quantized,
)
from hydrajax.models.layout import MODEL, Layout, same, transposed
from hydrajax.models.llama_config import LlamaConfig

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
EMBEDDING = "model.embed_tokens.weight"


class AssistantFormat(HeadFormat):
    """The format of transformers."""

    name = "gemma4-assistant"
    stem = MODEL
    known_by = "Gemma 4's assistant (model_type gemma4_assistant)"
    read_by = "transformers reads it as `assistant_model` of a Gemma 4."
    ignored = r"lm_head\.weight"  # a copy of the embedding
    dtype_field = "dtype"

    def recognises(self, config, names):
        return config.get("model_type") in KINDS

    def drafter(self, config, files, base):
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise HydrajaxError(f"{CONFIG}: text_config: got {text!r}, expected an object")
        refuse_quantized(config)
        expect(config, {"use_ordered_embeddings": (False, None)})
        shared = {"num_kv_shared_layers": text.get("num_kv_shared_layers") or text.get("num_hidden_layers")}
        c = to_llama_config(text | shared, f"{CONFIG}: text_config")
        check_sizes((c.vocab_size, integer(config, "backbone_hidden_size", 1, 1536)), base)
        if c.any_experts or c.per_layer_width or not all(kind.shared_kv for kind in c.kinds):
            raise HydrajaxError(
                f"{CONFIG}: text_config: got experts, embeddings per layer, or layers that have keys and values; "
                "an assistant has none"
            )
        drafter = Gemma4Assistant(c, base.width)
        drafter.sources(base)
        return drafter

    def layout(self, drafter, config) -> Layout:
        c = drafter.config
        layout = [
            transposed(("reduce",), "pre_projection.weight", c.width, 2 * drafter.base_width),
            transposed(("restore",), "post_projection.weight", drafter.base_width, c.width),
            transposed(("lm_kernel",), EMBEDDING, c.vocab_size, c.width),
            same(("norm", "scale"), "model.norm.weight", c.width),
        ]
        for i in range(c.n_layers):
            layout += decoder_layer((f"layers_{i}",), f"model.layers.{i}.", c.of_layer(i))
        return layout

    def settled(self, drafter, files, dtype):
        found = files.dtype("pre_projection.weight") if dtype is None else dtype
        return dataclasses.replace(drafter, dtype=jnp.dtype(found))

    def config(self, drafter, made_for: MadeFor) -> dict[str, Any]:
        check_class(drafter, Gemma4Assistant)
        check_all_tokens(drafter)
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": KINDS[0],
            "backbone_hidden_size": drafter.base_width,
            "use_ordered_embeddings": False,
            "tie_word_embeddings": True,
            "text_config": from_llama_config(drafter.config, CONFIG),
        }


def check(heads: Gemma4Assistant, base: LlamaConfig) -> None:
    """`Files.check`."""
    for name in ("depth", "ttt_length"):
        if not 1 <= getattr(heads, name) <= MOST:
            raise ValueError(f"{name}: got {getattr(heads, name)}, expected 1 to {MOST}")
    check_sizes((heads.config.vocab_size, heads.base_width), base)
    heads.sources(base)
    check_vocabulary(heads, base)


def about(heads: Gemma4Assistant) -> About:
    """`Files.about`."""
    c = heads.config
    rows = {
        "draft": f"{c.n_layers} layers of width {c.width} over the base's keys and values, up to {heads.depth} tokens "
        "ahead",
        "width, vocabulary": f"{heads.base_width}, {c.vocab_size}",
    }
    if heads.vocabulary is not None:
        rows["draft vocabulary"] = str(heads.lm_head.size(c.vocab_size))
    return About("An assistant as Gemma 4's", "gemma4-assistant", rows)


FILES = Files((AssistantFormat(),), check, about)
