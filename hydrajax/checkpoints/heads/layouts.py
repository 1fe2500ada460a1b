"""The key maps of draft heads as other programs name them: official Hydra, official Medusa, vLLM's Medusa.

A block that all layers share is written once per application, as the official code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.config import LlamaConfig
from hydrajax.models.layout import Entry, Layout, Path, decoder_layer, same, transposed, zeros


class Naming(NamedTuple):
    """block(k, i): what names of block i of head k begin with; linear: its inner Linear; lm_head(k): that of head k."""

    block: Callable[[int, int], str]
    linear: str
    lm_head: Callable[[int], str]


def hydra_naming(behind_prefix: bool) -> Naming:
    """The released Hydra code's; behind a prefix layer a dropout precedes every block and lm head and is counted."""
    if behind_prefix:
        return Naming(lambda k, i: f"hydra_mlp.{k}.{2 * i + 1}", ".linear", lambda k: f"hydra_lm_head.{k}.1")
    return Naming(lambda k, i: f"hydra_mlp.{k}.{i}", ".linear", lambda k: f"hydra_lm_head.{k}")


def medusa_naming(n_layers: int, prefix: str = "") -> Naming:
    """The released Medusa code's, TGI's too; prefix: ``medusa_head.`` where the base is in the same file (Medusa-2)."""
    return Naming(lambda k, i: f"{prefix}{k}.{i}", ".linear", lambda k: f"{prefix}{k}.{n_layers}")


# vllm/model_executor/models/medusa.py: `blocks` of ResidualBlock, whose `layers` are Linear; `lm_heads`.
VLLM_NAMING = Naming(lambda k, i: f"blocks.{k}.layers.{i}", "", lambda k: f"lm_heads.{k}")


def heads_layout(
    heads: HydraHeads | MedusaHeads, naming: Naming, path: Path = (), *, block_bias: bool = True
) -> Layout:
    """Every tensor of a stack of heads, which lies under ``path`` in our parameters.

    block_bias: whether the files hold the blocks' biases; where not, they are read as zeros.
    """
    width, layout = heads.width, []
    for k in range(heads.n_heads):
        head, at = heads.head(k), (*path, f"head_{k}")
        stems = [naming.block(k, i) for i in range(head.n_layers)]
        if head.path_length is not None:
            layout.append(_conditioned((*at, "conditioned"), stems.pop(0), k, width))
        stems = [stem + naming.linear for stem in stems]
        groups = [stems] if head.share_blocks and stems else [[stem] for stem in stems]
        for i, (stem, *copies) in enumerate(groups):
            block = (*at, f"blocks_{i}")
            weights, biases = ([f"{copy}.{part}" for copy in copies] for part in ("weight", "bias"))
            layout.append(transposed((*block, "kernel"), f"{stem}.weight", width, width, copies=tuple(weights)))
            if block_bias:
                layout.append(same((*block, "bias"), f"{stem}.bias", width, copies=tuple(biases)))
            else:
                layout.append(zeros((*block, "bias"), width))
        lm_head = naming.lm_head(k)
        layout.append(transposed((*at, "lm_kernel"), f"{lm_head}.weight", heads.vocab_size, width))
        if head.lm_head_bias:
            layout.append(same((*at, "lm_bias"), f"{lm_head}.bias", heads.vocab_size))
    return layout


def _conditioned(path: Path, stem: str, k: int, width: int) -> Entry:
    """W and R of `hydrajax.drafters.heads.ConditionedBlock`, which keeps [h, E(root)] and the path's inputs apart."""
    parts = ("linear", "res_connection")
    theirs = {f"{stem}.{part}.weight": (width, (k + 2) * width) for part in parts}
    theirs |= {f"{stem}.{part}.bias": (width,) for part in parts}
    names = ("shared_kernel", "path_kernel", "bias") if k else ("shared_kernel", "bias")

    def join(w, r, w_bias, r_bias):
        kernel = np.stack([w.T, r.T], axis=1)
        halves = (kernel[: 2 * width], kernel[2 * width :]) if k else (kernel,)
        return (*halves, np.stack([w_bias, r_bias]))

    def split(*ours):
        *halves, bias = ours
        kernel = np.concatenate(halves)
        return kernel[:, 0].T, kernel[:, 1].T, bias[0], bias[1]

    return Entry(tuple((*path, name) for name in names), theirs, join, split)


def prefix_layout(base: LlamaConfig, path: Path = ("prefix",)) -> Layout:
    """The prefix layer in the released Hydra++ files: a one-layer LLaMA without its embedding."""
    layer = decoder_layer((*path, "layer"), "prefix_embeding_layer.layers.0.", base.plain_layer)
    return [*layer, same((*path, "norm", "scale"), "prefix_embeding_layer.norm.weight", base.width)]


def hydra_layout(heads: HydraHeads | MedusaHeads, prefix: LlamaConfig | None) -> Layout:
    """Grounded (`HydraHeads`) or ungrounded Hydra heads, behind a prefix layer of a base of that shape or none."""
    if prefix is None:
        return heads_layout(heads, hydra_naming(False))
    return prefix_layout(prefix) + heads_layout(heads, hydra_naming(True), ("heads",))
