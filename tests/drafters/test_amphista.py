"""Amphista heads: gradients and settings. test_heads.py compares them with the paper's equations in NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.lab import quick_jit
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.packed_forward import run_base
from hydrajax.train.losses import Objective, draft_loss

VOCAB = 61  # of the `tiny_model` fixture
SMALL = LmHead(rank=7, vocabulary=Vocabulary(range(0, VOCAB, 2)))


@pytest.mark.slow
def test_every_parameter_learns(base):
    drafter = dataclasses.replace(
        AmphistaHeads.for_base(base.config, jnp.float32), num_draft_heads=2, small_lm_head=SMALL
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(2, 12), dtype=np.int32))
    batch = {"tokens": tokens, "labels": tokens}

    @quick_jit
    def slopes(rng):
        out = run_base(base.model, base.params, tokens)

        def loss(params):
            objective = Objective(lm_weight=0.5, teacher_weight=2.0)
            return draft_loss(objective, drafter, params, out.aux_hidden_states, out.hidden, batch, base)[0]

        return jax.grad(loss)(drafter.init(rng, base))

    for path, leaf in jax.tree.leaves_with_path(slopes(jax.random.key(0))):
        assert float(jnp.max(jnp.abs(leaf))) > 0, jax.tree_util.keystr(path)


def test_bad_settings_are_rejected(base):
    heads = AmphistaHeads.for_base(base.config, jnp.float32)
    for layers in (-1, 5):
        with pytest.raises(HydrajaxError, match=f"adaptation_layers: got {layers}, expected 0 to num_draft_heads, 4"):
            dataclasses.replace(heads, adaptation_layers=layers)
    with pytest.raises(HydrajaxError, match="by the settings"):
        heads.trained_on(dataclasses.replace(heads, auto_embedding_layers=2))
    assert heads.trained_on(AmphistaHeads.for_base(base.config, jnp.float32)) == heads
