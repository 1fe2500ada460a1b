"""Floating-point operations of a model, and what a device can do: for model FLOPs utilisation (MFU).

MFU counts what the mathematics needs (PaLM, appendix B): no recomputation, a causal half of the attention.
"""

from __future__ import annotations

import re

import jax
from jax.tree_util import DictKey

from hydrajax.drafters.prefix import heads_of
from hydrajax.models.config import LlamaConfig

# Peak dense bf16 multiply-adds of one chip, in FLOP/s as the makers publish them, by a part of jax's device_kind.
PEAK_BF16 = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "T4": 65e12,  # float16
    "TPU v6": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,  # as jax names the v5p
    "TPU v4": 275e12,
}


def matmul_params(params) -> int:
    """Weights that every token is multiplied with: matrices, but no bias and not the table that is only looked up."""
    leaves = jax.tree.leaves_with_path(params)
    looked_up = [DictKey("embedding"), DictKey("qkv_bias"), DictKey("bias")]
    return sum(leaf.size for path, leaf in leaves if leaf.ndim > 1 and path[-1] not in looked_up)


def forward_flops(config: LlamaConfig, params, length: int, n_layers: int | None = None) -> float:
    """Per token of a ``length``-token row: 2 per weight, and scores and weighted sums over the past in each layer."""
    layers = config.n_layers if n_layers is None else n_layers
    lm_head = config.vocab_size * config.width if config.tied_lm_head and "embedding" in params else 0
    attention = 2 * 2 * config.n_heads * config.head_dim * length / 2
    return 2.0 * (matmul_params(params) + lm_head) + layers * attention


def peak_flops(device: jax.Device) -> float | None:
    """Of one device in bf16; None if it is not in the table (a CPU's peak depends on its clock and its neighbours)."""
    for name, peak in PEAK_BF16.items():
        if re.search(rf"{name}(?![0-9A-Za-z])", device.device_kind):  # an L40S is no L4
            return peak
    return None


def drafter_forward_flops(drafter, params, length: int) -> float:
    """Per token of the teacher-forced pass: every head once, a prefix layer with its attention."""
    heads = heads_of(drafter)
    prefix = 0.0
    if heads is not drafter:
        prefix = forward_flops(drafter.config, params["prefix"], length, n_layers=1)
        params = params["heads"]
    repeated = sum(
        (heads.head(k).n_plain - 1) * params[f"head_{k}"]["blocks_0"]["kernel"].size
        for k in range(heads.depth)
        if heads.share_blocks and heads.head(k).n_plain
    )
    return prefix + 2.0 * (matmul_params(params) + repeated)
