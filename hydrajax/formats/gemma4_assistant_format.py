"""Files of Gemma 4's assistant (`hydrajax.drafters.gemma4_assistant`), as transformers reads and writes them.

``config.json`` has the layers' settings in ``text_config``. The lm head is the embedding of the same file, which
nothing else reads.
"""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.gemma4_assistant import Gemma4Assistant, OrderedEmbedding
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.formats import interface
from hydrajax.formats.eagle_parts import INTEGERS, check_all_tokens, check_class, check_vocabulary
from hydrajax.formats.interface import CONFIG
from hydrajax.models.layout import MODEL, Entry, Layout, Parameter, same, transposed
from hydrajax.models.llama_config import LlamaConfig

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
EMBEDDING, ORDER = "model.embed_tokens.weight", "masked_embedding.token_ordering"


class AssistantFormat(interface.HeadFormat):
    """The format of transformers."""

    name = "gemma4-assistant"
    stem = MODEL
    known_by = "Gemma 4's assistant (model_type gemma4_assistant)"
    read_by = "transformers reads it as `assistant_model` of a Gemma 4."
    ignored = r"lm_head\.weight|" + re.escape(ORDER)  # a copy of the embedding, and integers
    dtype_field = "dtype"

    def recognises(self, config, names):
        return config.get("model_type") in KINDS

    def drafter(self, config, files, base):
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise HydrajaxError(f"{CONFIG}: text_config: got {text!r}, expected an object")
        interface.refuse_quantized(config)
        shared = {"num_kv_shared_layers": text.get("num_kv_shared_layers") or text.get("num_hidden_layers")}
        c = to_llama_config(text | shared, f"{CONFIG}: text_config")
        interface.check_sizes((c.vocab_size, interface.integer(config, "backbone_hidden_size", 1, 1536)), base)
        if c.any_experts or c.per_layer_width or not all(kind.shared_kv for kind in c.kinds):
            raise HydrajaxError(
                f"{CONFIG}: text_config: got experts, embeddings per layer, or layers that have keys and values; "
                "an assistant has none"
            )
        drafter = Gemma4Assistant(c, base.width, ordered=_ordered(config, c.vocab_size))
        if drafter.ordered and (files.shapes.get(ORDER) != (c.vocab_size,) or files.dtype(ORDER) not in INTEGERS):
            raise HydrajaxError(f"{ORDER}: expected int64 [{c.vocab_size}]")
        drafter.sources(base)
        return drafter

    def layout(self, drafter, config) -> Layout:
        c = drafter.config
        layout = [
            transposed(("reduce",), "pre_projection.weight", c.width, 2 * drafter.base_width),
            transposed(("restore",), "post_projection.weight", drafter.base_width, c.width),
            *_embedding(drafter),
            same(("norm", "scale"), "model.norm.weight", c.width),
        ]
        for i in range(c.n_layers):
            layout += decoder_layer((f"layers_{i}",), f"model.layers.{i}.", c.of_layer(i))
        return layout

    def settled(self, drafter, files, dtype):
        found = files.dtype("pre_projection.weight") if dtype is None else dtype
        ordered = drafter.ordered
        if ordered is not None:
            ordered = dataclasses.replace(ordered, tokens=Vocabulary.ordered(files.read(ORDER)))
        return dataclasses.replace(drafter, dtype=jnp.dtype(found), ordered=ordered)

    def config(self, drafter, made_for: interface.MadeFor) -> dict[str, Any]:
        check_class(drafter, Gemma4Assistant)
        check_all_tokens(drafter)
        ordered = drafter.ordered
        clusters = {"num_centroids": ordered.clusters, "centroid_intermediate_top_k": ordered.chosen} if ordered else {}
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": KINDS[0],
            "backbone_hidden_size": drafter.base_width,
            "use_ordered_embeddings": ordered is not None,
            "tie_word_embeddings": True,
            "text_config": from_llama_config(drafter.config, CONFIG),
            **clusters,
        }

    def constants(self, drafter):
        return {} if drafter.ordered is None else {ORDER: drafter.ordered.tokens.tokens.astype(np.int64)}


def _ordered(config: dict, vocab_size: int) -> OrderedEmbedding | None:
    """Return the ordered embedding that ``config.json`` declares, with the tokens in their own order."""
    if not interface.flag(config, "use_ordered_embeddings", False):
        return None
    clusters = interface.integer(config, "num_centroids", 1, 2048)
    chosen = interface.integer(config, "centroid_intermediate_top_k", 1, 32)
    if vocab_size % clusters or chosen > clusters:
        raise HydrajaxError(
            f"{CONFIG}: num_centroids: got {clusters}, expected at least {chosen}, and a divisor of {vocab_size} tokens"
        )
    return OrderedEmbedding(clusters, chosen, Vocabulary(range(vocab_size)))


def _embedding(drafter: Gemma4Assistant) -> Layout:
    """Return the key map of the lm head: the embedding, whose rows an ordered one has by cluster."""
    c, ordered = drafter.config, drafter.ordered
    if ordered is None:
        return [transposed(("lm_kernel",), EMBEDDING, c.vocab_size, c.width)]
    order, by_cluster = ordered.tokens.tokens, (ordered.clusters, -1, c.width)

    def split(kernels):
        rows = np.empty((c.vocab_size, c.width), kernels.dtype)
        rows[order] = kernels.swapaxes(1, 2).reshape(-1, c.width)
        return (rows,)

    return [
        transposed(("centroids",), "masked_embedding.centroids.weight", ordered.clusters, c.width),
        Entry(
            (("lm_clusters",),),
            {EMBEDDING: (c.vocab_size, c.width)},
            lambda rows: (Parameter((rows[order].reshape(by_cluster),), order=(0, 2, 1)),),
            split,
        ),
    ]


def check(heads: Gemma4Assistant, base: LlamaConfig) -> None:
    """`Files.check`."""
    interface.check_counts(heads, "depth", "ttt_length")
    interface.check_sizes((heads.config.vocab_size, heads.base_width), base)
    heads.sources(base)
    check_vocabulary(heads, base)


def about(heads: Gemma4Assistant) -> interface.About:
    """`Files.about`."""
    layers = f"{heads.config.n_layers} layers of width {heads.config.width} over the base's keys and values"
    return interface.about_layers(heads, "An assistant as Gemma 4's", "gemma4-assistant", layers, heads.base_width)


FILES = interface.Files((AssistantFormat(),), check, about)
