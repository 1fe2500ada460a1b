"""One training step: what it changes, what it leaves alone, and the learning rate schedule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.train.step import init_draft, learning_rate, make_base_step, make_head_step, make_optimizer


def repeating_tokens(vocab: int) -> np.ndarray:
    """Rows that count upwards: every token follows from the one before."""
    return (np.arange(24) + np.arange(4)[:, None] * 7).astype(np.int32) % vocab


def test_base_step_learns_a_simple_text(tiny_model):
    model, params = tiny_model
    params = jax.tree.map(jnp.copy, params)  # the step donates them, the fixture is shared
    optimizer = make_optimizer(3e-3, 60, warmup=5)
    step, opt_state = make_base_step(model, optimizer), optimizer.init(params)
    tokens = repeating_tokens(model.config.vocab_size)
    losses = []
    for _ in range(60):
        params, opt_state, loss = step(params, opt_state, tokens)
        losses.append(float(loss))
    assert losses[0] > 2.0
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("teacher", [True, False])
def test_head_step_trains_the_draft_alone(tiny_model, teacher):
    model, base = tiny_model
    before = jax.tree.map(np.array, base)
    config = model.config
    drafter = WithPrefix(HydraHeads(2, config.width, config.vocab_size), config)
    draft = init_draft(model, drafter, base, jax.random.key(0))
    start = jax.tree.map(np.array, draft)
    optimizer = make_optimizer(3e-3, 40, warmup=4)
    opt_state = optimizer.init(draft)
    step = make_head_step(model, drafter, optimizer, teacher=teacher)
    tokens = repeating_tokens(config.vocab_size)
    losses = []
    for _ in range(40):
        draft, opt_state, per_head = step(draft, opt_state, base, tokens)
        assert per_head.shape == (2,)
        losses.append(float(per_head.sum()))
    assert losses[-1] < 0.8 * losses[0]
    # The base is the same bit for bit, every draft array has moved, and no optimizer state has the base's shapes.
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))
    for (path, old), new in zip(jax.tree.leaves_with_path(start), jax.tree.leaves(draft), strict=True):
        assert np.any(old != np.asarray(new)), path
    moments = sum(leaf.size for leaf in jax.tree.leaves(opt_state) if leaf.ndim > 0)
    assert moments == 2 * sum(leaf.size for leaf in jax.tree.leaves(draft))


def test_fresh_heads_share_no_buffer_with_the_base(tiny_model):
    """A donated lm head that is the base's own array would delete it."""
    model, base = tiny_model
    draft = init_draft(model, HydraHeads(2, model.config.width, model.config.vocab_size), base, jax.random.key(0))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((draft, base))]
    assert len(set(pointers)) == len(pointers)


def test_learning_rate_equals_the_official_cosine(golden):
    recorded = np.load(golden / "lr_schedules.npz")["cosine"]  # warm-up 100, total 1000, final multiplier 0.33
    schedule = learning_rate(1.0, 1000, 100, 0.33)
    ours = np.array([float(schedule(step)) for step in range(0, 1001, 25)])
    np.testing.assert_allclose(ours, recorded[::25], atol=1e-5)
