"""Heads with a smaller lm head are trained, saved and read back like any others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hydrajax.checkpoints.heads.export import export_heads
from hydrajax.checkpoints.heads.load import load_draft
from hydrajax.models.base import BoundBase, init_base
from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama
from hydrajax.models.rows import run_base
from hydrajax.train.config import DraftConfig
from hydrajax.train.losses import Objective, draft_loss
from hydrajax.train.tasks.heads import make_drafter

SHAPE = LlamaConfig(97, 32, 64, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=16, max_positions=64)


@pytest.mark.parametrize("heads", ["medusa", "hydra"])
@pytest.mark.parametrize(
    ("lm_head", "lm_rank", "names"), [("shared", None, set()), ("low_rank", 8, {"lm_down", "lm_up"})]
)
def test_they_learn_and_come_back(heads, lm_head, lm_rank, names, tmp_path):
    model = Llama(SHAPE, jnp.float32)
    base = BoundBase(model, init_base(model, jax.random.key(0)))
    drafter = make_drafter(DraftConfig(heads=heads, n_heads=2, lm_head=lm_head, lm_rank=lm_rank), SHAPE, jnp.float32)
    params = drafter.init(jax.random.key(1), base)
    assert {name for name in params["head_0"] if name.startswith("lm_")} == names
    # A text in which every token says what the next two are.
    tokens = (np.arange(16) * 5 + np.random.default_rng(0).integers(0, 97, (8, 1))) % 97
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "labels": jnp.asarray(tokens, jnp.int32)}
    out = run_base(model, base.params, batch["tokens"])
    objective, optimizer = Objective(lm_weight=1.0, teacher_weight=0.0), optax.adam(3e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            return draft_loss(objective, drafter, params, out.features, out.hidden, batch, base)[0]

        value, slope = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(slope, state)
        return optax.apply_updates(params, update), state, value

    state, losses = optimizer.init(params), []
    for _ in range(150):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]

    export_heads(tmp_path / "heads", drafter, params, dtype=jnp.float32)
    again, read = load_draft(tmp_path / "heads", SHAPE, jnp.float32)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, read, jax.tree.map(np.asarray, params))
