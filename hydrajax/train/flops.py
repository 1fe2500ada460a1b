"""Floating-point operations of a model, and what a device can do: for model FLOPs utilisation (MFU).

MFU counts what the mathematics needs (PaLM, appendix B): no recomputation, a causal half of the attention.
"""

from __future__ import annotations

import re

import jax
from jax.tree_util import DictKey

from hydrajax.drafters.costs import DecoderLayers, Matmul
from hydrajax.drafters.drafter import Trainable
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


def layer_weights(config: LlamaConfig) -> int:
    """Weights of one decoder layer's matrices: query, key, value and out, then gate, up and down."""
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return config.width * (2 * heads + 2 * kv_heads) + 3 * config.width * config.mlp_width


def causal_attention_flops(config: LlamaConfig, length: int) -> float:
    """Of one layer, per token of a ``length``-token row: scores and weighted sums over the past."""
    return 2 * 2 * config.n_heads * config.head_dim * length / 2


def forward_flops(config: LlamaConfig, params, length: int) -> float:
    """Of a base, per token of a ``length``-token row: 2 for each weight, and the attention of every layer."""
    lm_head = config.vocab_size * config.width if config.tied_lm_head and "embedding" in params else 0
    return 2.0 * (matmul_params(params) + lm_head) + config.n_layers * causal_attention_flops(config, length)


def peak_flops(device: jax.Device) -> float | None:
    """Of one device in bf16; None if it is not in the table (a CPU's peak depends on its clock and its neighbours)."""
    for name, peak in PEAK_BF16.items():
        if re.search(rf"{name}(?![0-9A-Za-z])", device.device_kind):  # an L40S is no L4
            return peak
    return None


def drafter_forward_flops(drafter: Trainable, length: int) -> float:
    """Per token of the drafter's training forward pass over a ``length``-token row, as the drafter describes it."""
    total = 0.0
    for cost in drafter.teacher_costs(length):
        if isinstance(cost, DecoderLayers):
            weights, attention = layer_weights(cost.config), causal_attention_flops(cost.config, cost.tokens)
            attention *= 1 if cost.causal else 2
            total += cost.batch * cost.tokens * cost.config.n_layers * (2.0 * weights + attention)
        elif isinstance(cost, Matmul):
            total += 2.0 * cost.repeats * cost.rows * cost.fan_in * cost.fan_out
    return total / length
