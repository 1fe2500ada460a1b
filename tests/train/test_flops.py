"""Floating-point operations against the textbook count, written out for LLaMA 7B and for Hydra++ heads on it."""

from __future__ import annotations

import jax.numpy as jnp

from hydrajax.bench.shapes import PRESETS
from hydrajax.models.adapter import Adapter
from hydrajax.models.llama import Llama
from hydrajax.train.flops import drafter_forward_flops, forward_flops
from hydrajax.train.run_config import draft_of
from hydrajax.train.tasks.heads_task import make_drafter

D, MLP, V, LENGTH = 4096, 11_008, 32_000, 2048  # LLaMA 7B
LAYER = 4 * D * D + 3 * D * MLP  # query, key, value, out; gate, up, down
CAUSAL = 2 * 2 * D * LENGTH / 2  # scores and weighted sum: a multiply-add each, over half the row on average


MODEL = Llama(PRESETS["7b"], jnp.bfloat16)


def test_llama_7b():
    """Embedding look-ups and norms do not count as matmuls."""
    assert forward_flops(MODEL, LENGTH) == (2 * (32 * LAYER + D * V), 32 * CAUSAL)
    assert forward_flops(MODEL, LENGTH, logits=False).weights == 2 * 32 * LAYER
    assert forward_flops(MODEL.clone(quantize="int8"), LENGTH) == forward_flops(MODEL, LENGTH)
    # 6.6 billion weights in all: the count that everyone quotes.
    assert round(forward_flops(MODEL, LENGTH).weights / 2e9, 1) == 6.6


def test_an_adapter_adds_its_matmuls():
    rank = 16
    found = forward_flops(MODEL.clone(adapter=Adapter(rank=rank, targets=("q_proj", "down_proj", "lm_head"))), LENGTH)
    adapter = rank * (32 * (D + D + MLP + D) + D + V)
    assert found == (2 * (32 * LAYER + D * V + adapter), 32 * CAUSAL)


def test_grouped_queries_cost_less_in_the_projection_and_the_same_in_attention():
    shape = PRESETS["8b"]
    layer = 2 * D * D + 2 * D * 8 * 128 + 3 * D * shape.mlp_width
    assert forward_flops(Llama(shape), LENGTH) == (2 * (32 * layer + D * shape.vocab_size), 32 * CAUSAL)


def test_a_tied_lm_head_is_multiplied_where_it_is_asked_for():
    tied, untied = (Llama(PRESETS["tiny"].replace(n_layers=1, tied_lm_head=tied)) for tied in (True, False))
    for logits in (True, False):
        assert forward_flops(tied, 64, logits) == forward_flops(untied, 64, logits)


def flops_of(**settings) -> float:
    drafter = make_drafter(draft_of(**settings), PRESETS["7b"], "bfloat16")
    return drafter_forward_flops(drafter, MODEL, LENGTH)


def test_hydra_pp():
    """A prefix layer; head k reads k + 2 vectors with two matrices, then 3 blocks, shared or not, and an lm head."""
    heads = sum(2 * (k + 2) * D * D + 3 * D * D + D * V for k in range(4))
    assert flops_of(n_layers=4, prefix=True) == 2 * (LAYER + heads) + CAUSAL


def test_medusa():
    assert flops_of(heads="medusa", n_layers=2, share_blocks=False) == 2 * 4 * (2 * D * D + D * V)


AT_THE_SAME_PLACE = 2 * D  # the score of a later guess with an earlier one; the weighted sum is elementwise


def test_eagle():
    """A map of two vectors to one, a layer and the base's lm head, each time one guess further."""
    guess = 2 * (2 * D * D + LAYER + D * V) + CAUSAL
    assert flops_of(heads="eagle", ttt_length=2) == 2 * guess + AT_THE_SAME_PLACE


def test_eagle_3():
    """Three vectors are mapped to one, once; queries, keys and values are made of two vectors."""
    guess, pairs = 2 * (LAYER + 3 * D * D + D * 8000) + CAUSAL, 7 * 6 // 2
    assert flops_of(heads="eagle3", vocabulary=8000) == 2 * 3 * D * D + 7 * guess + pairs * AT_THE_SAME_PLACE


def test_amphista():
    """Two stages of fc and a layer, a matrix for each head, a layer for each head that sees all four, and lm heads."""
    stages = 2 * (2 * (2 * D * D + LAYER) + CAUSAL)
    together = 4 * (2 * LAYER + 2 * 2 * D * 4)
    assert flops_of(heads="amphista") == stages + together + 2 * 4 * (D * D + D * V)
