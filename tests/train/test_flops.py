"""Floating-point operations against the textbook count, written out for LLaMA 7B and for Hydra++ heads on it."""

from __future__ import annotations

from types import SimpleNamespace

import flax.linen as nn
import jax.numpy as jnp
import pytest

from hydrajax.models.base import abstract_base
from hydrajax.models.config import PRESETS
from hydrajax.models.llama import Llama
from hydrajax.train.config import draft_of
from hydrajax.train.flops import drafter_forward_flops, forward_flops, matmul_params, peak_flops
from hydrajax.train.tasks.heads import make_drafter

D, MLP, V, LENGTH = 4096, 11_008, 32_000, 2048  # LLaMA 7B
LAYER = 4 * D * D + 3 * D * MLP  # query, key, value, out; gate, up, down
CAUSAL = 2 * 2 * D * LENGTH / 2  # scores and weighted sum: a multiply-add each, over half the row on average


def abstract(shape):
    """One layer of the shape: the count is linear in the layers, and tracing 32 takes seconds."""
    model = Llama(shape.replace(n_layers=1), jnp.bfloat16)
    return model, nn.unbox(abstract_base(model))


def test_llama_7b():
    model, params = abstract(PRESETS["7b"])
    assert matmul_params(params) == LAYER + D * V  # the embedding is looked up, not multiplied; norms are no matrices
    assert forward_flops(model.config, params, LENGTH) == 2 * (LAYER + D * V) + CAUSAL
    # 6.6 billion weights in all: the count that everyone quotes.
    assert round((32 * LAYER + D * V) / 1e9, 1) == 6.6


def test_grouped_queries_cost_less_in_the_projection_and_the_same_in_attention():
    shape = PRESETS["8b"]
    model, params = abstract(shape)
    layer = 2 * D * D + 2 * D * 8 * 128 + 3 * D * shape.mlp_width
    assert forward_flops(model.config, params, LENGTH) == 2 * (layer + D * shape.vocab_size) + CAUSAL


def test_a_tied_lm_head_is_still_multiplied():
    model, params = abstract(PRESETS["tiny"])
    tied, tied_params = abstract(PRESETS["tiny"].replace(tied_lm_head=True))
    assert "lm_head" not in tied_params
    assert forward_flops(tied.config, tied_params, 64) == forward_flops(model.config, params, 64)


@pytest.mark.parametrize("share_blocks", [True, False])
def test_hydra_pp(share_blocks):
    """A prefix layer; head k reads k + 2 vectors with two matrices, then 3 blocks, shared or not, and an lm head."""
    drafter = make_drafter(draft_of(n_layers=4, prefix=True, share_blocks=share_blocks), PRESETS["7b"], "bfloat16")
    heads = sum(2 * (k + 2) * D * D + 3 * D * D + D * V for k in range(4))
    assert drafter_forward_flops(drafter, LENGTH) == 2 * (LAYER + heads) + CAUSAL


def test_medusa():
    drafter = make_drafter(draft_of(heads="medusa", n_layers=2, share_blocks=False), PRESETS["7b"], "bfloat16")
    assert drafter_forward_flops(drafter, LENGTH) == 2 * 4 * (2 * D * D + D * V)


def test_eagle():
    """A map of two vectors to one, a layer and the base's lm head, each time one guess further."""
    drafter = make_drafter(draft_of(heads="eagle", unroll=2), PRESETS["7b"], "bfloat16")
    assert drafter_forward_flops(drafter, LENGTH) == 2 * (2 * (2 * D * D + LAYER + D * V) + CAUSAL)


def test_eagle_3():
    """Three vectors are mapped to one, once; queries, keys and values are made of two vectors."""
    drafter = make_drafter(draft_of(heads="eagle3", vocabulary=8000), PRESETS["7b"], "bfloat16")
    assert drafter_forward_flops(drafter, LENGTH) == 2 * 3 * D * D + 7 * (2 * (LAYER + 3 * D * D + D * 8000) + CAUSAL)


def test_amphista():
    """Two stages of fc and a layer, a matrix for each head, a layer for each head that sees all four, and lm heads."""
    drafter = make_drafter(draft_of(heads="amphista"), PRESETS["7b"], "bfloat16")
    stages = 2 * (2 * (2 * D * D + LAYER) + CAUSAL)
    together = 4 * (2 * LAYER + 2 * 2 * D * 4)
    assert drafter_forward_flops(drafter, LENGTH) == stages + together + 2 * 4 * (D * D + D * V)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),  # another chip, of three times the speed
        ("Tesla T4", 65e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("cpu", None),
    ],
)
def test_peak_by_device_kind(kind, peak):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == peak
