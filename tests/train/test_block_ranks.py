"""Ranks and FLOPs of drafts of one pass, as training and the dry run read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import random_params
from helpers.loss_examples import check_ranks
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.dflash import DFlash
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train.flops import drafter_forward_flops


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_ranks_are_those_of_a_block_at_every_position(tiny_model, kind):
    model, base = tiny_model
    drafter = (
        DFlash.for_base(model.config, jnp.float32, BlockSettings(1, 4, (1,)))
        if kind == "dflash"
        else DSpark(model.config.plain_layer.replace(qk_norm=True), (1,), 60, 3, vocabulary=Vocabulary(range(0, 61, 2)))
    )
    params, bound = random_params(drafter, tiny_model), BoundBase(model, base)
    tokens = np.random.default_rng(2).integers(0, 61, (2, 11), dtype=np.int32)
    segments = np.array([[1] * 11, [1] * 6 + [2] * 5], np.int32)
    anchors = np.broadcast_to(np.arange(1, 11, dtype=np.int32), (2, 10))

    @jax.jit
    def run(params):
        aux = run_base(model, base, tokens, drafter.spec.aux_hidden_layers, segments).aux_hidden_states
        batch = {"tokens": tokens, "segments": segments}
        ranks = drafter.ranks(params, aux, batch, bound, chunk_tokens=8, depth=3)
        hidden = drafter.blocks(params, aux, tokens, anchors, bound, segments)
        before = jnp.zeros(hidden.shape[:-1], jnp.int32)  # no Markov head reads it
        return ranks, drafter.lm_head.over_all_tokens(drafter.block_logits(params, hidden, before, bound), 61)

    ranks, logits = map(np.asarray, run(params))
    check_ranks(ranks[..., :10], np.moveaxis(logits, 2, 0), tokens)


def test_flops_count_blocks(tiny_model):
    """Per token: context keys, and the rows of the blocks. The products of a block of one layer, by hand."""
    model, _ = tiny_model
    settings = DSparkSettings(1, 3, (0, 1), markov_rank=4, confidence_head=False, num_anchors=5)
    drafter = DSpark.for_base(model.config, jnp.float32, settings)
    c, length = drafter.config, 20
    attention = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    context = 2 * length * c.width * (2 * c.width + attention)
    rows = 5 * 3
    layer = 2 * rows * c.width * (attention + c.n_heads * c.head_dim + 3 * c.mlp_width)
    scores = 4 * rows * (length + rows) * c.n_heads * c.head_dim
    heads = 2 * rows * c.vocab_size * (c.width + 4)
    found = drafter_forward_flops(drafter, model, length) * length
    assert found == pytest.approx(context + layer + scores + heads, rel=1e-6)
