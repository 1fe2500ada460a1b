"""Noise and dropout in training: their size, and none without a random key."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.loss_examples import MIXED, VOCAB, WIDTH, random_params
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.base_model import BoundBase
from hydrajax.train.losses import IGNORED, Objective, draft_loss, input_noise


@pytest.fixture
def base(tiny_model):
    return BoundBase(*tiny_model)


@pytest.mark.parametrize(
    ("setting", "largest"),
    [({"noise_alpha": 75.0}, lambda n: 75 / np.sqrt(n * 512)), ({"feature_noise": 0.1}, lambda n: 0.1 * 512 / n)],
)
def test_noise_has_the_size_of_the_papers(setting, largest):
    """U(-1, 1) times α / sqrt(length · D) or a · 512 / length, length that of the document."""
    like = jnp.zeros((2, 30, 512), jnp.bfloat16)
    labels = np.zeros((2, 30), np.int32)
    labels[1, 20:] = IGNORED
    segments = np.array([[1] * 10 + [2] * 20, [1] * 30])
    draw = jax.jit(lambda segments: input_noise(jax.random.key(0), Objective(**setting), labels, segments, like))
    noise, packed = draw(None), draw(segments)
    assert noise.dtype == jnp.bfloat16
    for values, length in ((noise[0], 30), (noise[1], 20), (packed[0, :10], 10), (packed[0, 10:], 20)):
        values = np.asarray(values, np.float32) / largest(length)
        assert 0.99 < np.abs(values).max() < 1.01
        assert values.std() == pytest.approx(3**-0.5, rel=0.02)
        assert abs(values.mean()) < 0.02


def test_noise_and_dropout_need_a_key(base, example):
    aux_hidden_states, hidden, batch = example
    params = random_params(MedusaHeads(1, WIDTH, VOCAB), base)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def loss(dropout, alpha, key):
        drafter = MedusaHeads(1, WIDTH, VOCAB, dropout=dropout)
        objective = Objective(noise_alpha=alpha, chunk_tokens=8)
        return draft_loss(objective, drafter, params, aux_hidden_states, hidden, batch, base, key)[0]

    plain = float(loss(0.0, 0.0, None))
    assert float(loss(0.5, 75.0, None)) == plain
    for settings in ((0.5, 0.0), (0.0, 75.0)):
        values = [float(loss(*settings, jax.random.key(seed))) for seed in (1, 1, 2)]
        assert values[0] == values[1]
        assert len({plain, *values}) == 3


def test_gradients_under_dropout_are_those_of_the_loss(base, example):
    """The masks of the gradient are the masks of the value: finite differences agree."""
    aux_hidden_states, hidden, batch = example
    drafter = MedusaHeads(1, WIDTH, VOCAB, dropout=0.3)
    params = random_params(drafter, base)
    direction = random_params(drafter, base, seed=5)

    def along(step):
        moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
        objective = Objective(**MIXED, chunk_tokens=8)
        return draft_loss(objective, drafter, moved, aux_hidden_states, hidden, batch, base, jax.random.key(3))[0]

    value_and_slope = jax.jit(jax.value_and_grad(along))
    difference = (float(value_and_slope(1e-2)[0]) - float(value_and_slope(-1e-2)[0])) / 2e-2
    assert float(value_and_slope(0.0)[1]) == pytest.approx(difference, rel=1e-2)
