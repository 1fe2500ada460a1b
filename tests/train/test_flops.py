"""Floating-point operations against the textbook count, written out for LLaMA 7B and for Hydra++ heads on it."""

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


def test_bases():
    """Embedding look-ups and norms do not count as matmuls; an adapter adds its own."""
    assert forward_flops(MODEL, LENGTH) == (2 * (32 * LAYER + D * V), 32 * CAUSAL)
    assert forward_flops(MODEL, LENGTH, logits=False).weights == 2 * 32 * LAYER
    assert forward_flops(MODEL.clone(quantize="int8"), LENGTH) == forward_flops(MODEL, LENGTH)
    # 6.6 billion weights in all: the count that everyone quotes.
    assert round(forward_flops(MODEL, LENGTH).weights / 2e9, 1) == 6.6

    rank = 16
    found = forward_flops(MODEL.clone(adapter=Adapter(rank=rank, targets=("q_proj", "down_proj", "lm_head"))), LENGTH)
    adapter = rank * (32 * (D + D + MLP + D) + D + V)
    assert found == (2 * (32 * LAYER + D * V + adapter), 32 * CAUSAL)

    # Grouped queries cost less in the projection and the same in attention.
    shape = PRESETS["8b"]
    layer = 2 * D * D + 2 * D * 8 * 128 + 3 * D * shape.mlp_width
    assert forward_flops(Llama(shape), LENGTH) == (2 * (32 * layer + D * shape.vocab_size), 32 * CAUSAL)

    # A tied lm head is multiplied where it is asked for.
    tied, untied = (Llama(PRESETS["tiny"].replace(n_layers=1, tied_lm_head=tied)) for tied in (True, False))
    for logits in (True, False):
        assert forward_flops(tied, 64, logits) == forward_flops(untied, 64, logits)


AT_THE_SAME_PLACE = 2 * D  # the score of a later guess with an earlier one; the weighted sum is elementwise
DRAFTS = {
    # A prefix layer; head k reads k + 2 vectors with two matrices, then 3 blocks, shared or not, and an lm head.
    "hydra": (
        {"n_layers": 4, "prefix": True},
        2 * (LAYER + sum((2 * (k + 2) + 3) * D * D + D * V for k in range(4))) + CAUSAL,
    ),
    "medusa": ({"n_layers": 2, "share_blocks": False}, 2 * 4 * (2 * D * D + D * V)),
    # A map of two vectors to one, a layer and the base's lm head, each time one guess further.
    "eagle": ({"ttt_length": 2}, 2 * (2 * (2 * D * D + LAYER + D * V) + CAUSAL) + AT_THE_SAME_PLACE),
    # Three vectors are mapped to one, once; queries, keys and values are made of two vectors. Seven guesses.
    "eagle3": (
        {"vocabulary": 8000},
        2 * 3 * D * D + 7 * (2 * (LAYER + 3 * D * D + D * 8000) + CAUSAL) + 7 * 6 // 2 * AT_THE_SAME_PLACE,
    ),
    # Two stages of fc and a layer, a matrix for each head, a layer for each head that sees all four, and lm heads.
    "amphista": (
        {},
        2 * (2 * (2 * D * D + LAYER) + CAUSAL) + 4 * (2 * LAYER + 2 * 2 * D * 4) + 2 * 4 * (D * D + D * V),
    ),
}


def test_drafts_of_llama_7b():
    for heads, (settings, expected) in DRAFTS.items():
        drafter = make_drafter(draft_of(heads=heads, **settings), PRESETS["7b"], "bfloat16")
        assert drafter_forward_flops(drafter, MODEL, LENGTH) == expected, heads
