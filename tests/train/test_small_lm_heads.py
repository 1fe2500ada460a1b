"""Heads with a smaller lm head are trained, saved and loaded like any others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.train.losses import Objective, draft_loss
from hydrajax.train.run_config import draft_of
from hydrajax.train.tasks.heads_task import make_drafter

SHAPE = LlamaConfig(97, 32, 64, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=16, max_positions=64)


LOW_RANK = {"lm_down", "lm_up"}
# By far the most frequent targets, unordered.
FREQUENT = np.random.default_rng(1).permutation(97)[:60]
CASES = [
    ("medusa", {"lm_head": "low_rank", "lm_rank": 8, "vocabulary": 60}, LOW_RANK),
    ("medusa", {"lm_head": "shared", "vocabulary": 60}, set()),
    ("hydra", {"lm_head": "shared"}, set()),
    ("hydra", {"vocabulary": 60}, {"lm_kernel"}),
    ("amphista", {"lm_head": "low_rank", "lm_rank": 8}, LOW_RANK),
]


@pytest.mark.quick("low rank, 60")
@pytest.mark.parametrize(("heads", "lm_head", "names"), CASES, ids=["low rank, 60", *map(str, range(4))])
def test_they_learn_and_come_back(heads, lm_head, names, tmp_path):
    model = Llama(SHAPE, jnp.float32)
    base = BoundBase(model, jax.jit(lambda: init_base(model, jax.random.key(0)))())
    counts = np.bincount(FREQUENT, minlength=97) * 100 + np.arange(97)
    drafter = make_drafter(draft_of(heads=heads, num_draft_heads=2, **lm_head), SHAPE, jnp.float32, counts)
    known = sorted(FREQUENT.tolist()) if "vocabulary" in lm_head else list(range(97))
    assert drafter.vocabulary is None or drafter.vocabulary.tokens.tolist() == known
    params = jax.jit(lambda: drafter.init(jax.random.key(1), base))()
    assert {name for name in params["head_0"] if name.startswith("lm_")} == names
    # Every token determines the next two.
    tokens = (np.arange(16) * 5 + np.random.default_rng(0).integers(0, 97, (8, 1))) % 97
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "labels": jnp.asarray(tokens, jnp.int32)}
    out = jax.jit(lambda params: run_base(model, params, batch["tokens"]))(base.params)
    objective, optimizer = Objective(lm_weight=1.0, teacher_weight=0.0), optax.adam(3e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            return draft_loss(objective, drafter, params, out.aux_hidden_states, out.hidden, batch, base)[0]

        value, slope = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(slope, state)
        return optax.apply_updates(params, update), state, value

    state, losses = optimizer.init(params), []
    for _ in range(60):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]

    # Tokens outside the vocabulary rank last, trained ones near the front.
    batch = {"tokens": batch["tokens"]}
    ranks = np.asarray(drafter.ranks(params, out.aux_hidden_states, batch, base, 64, 2))
    for k in range(2):
        found, wanted = ranks[k][:, : -(k + 2)], tokens[:, k + 2 :]
        assert (found[~np.isin(wanted, known)] == 97).all()
        assert np.median(found[np.isin(wanted, known)]) < 20

    export_heads(tmp_path / "heads", drafter, params, dtype=jnp.float32)
    again, read = load_draft(tmp_path / "heads", SHAPE, jnp.float32)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, read, jax.tree.map(np.asarray, params))
