"""Target masks of the losses (gaps, micro-batches, packed documents), and noise and dropout in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.loss_examples import HEADS, MIXED, VOCAB, WIDTH, drafter_of, random_params
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train.losses import IGNORED, HeadCounts, Objective, draft_loss, head_counts, input_noise


@pytest.fixture
def base(tiny_model):
    return BoundBase(*tiny_model)


def test_ignored_targets_do_not_count(base, example):
    """No gradient flows into the teacher either."""
    aux_hidden_states, hidden, batch = example
    drafter = MedusaHeads(1, WIDTH, VOCAB)
    params = random_params(drafter, base)

    def loss(aux_hidden_states, hidden):
        return draft_loss(Objective(**MIXED), drafter, params, aux_hidden_states, hidden, batch, base)[0]

    into_features, into_teacher = jax.jit(jax.grad(loss, argnums=(0, 1)))(aux_hidden_states, hidden)
    # Head 0 at t predicts token t + 2 and hidden state t + 1.
    labels = np.pad(batch["labels"], ((0, 0), (0, 2)), constant_values=IGNORED)
    used = (labels[:, 2:] != IGNORED) | (labels[:, 1:-1] != IGNORED)
    assert 0 < used.sum() < used.size
    np.testing.assert_array_equal(np.abs(into_features).sum(axis=-1) > 0, used)
    assert not np.any(np.asarray(into_teacher))
    # No target at all is zero and not NaN.
    rows = {"tokens": batch["tokens"], "labels": np.full_like(batch["labels"], IGNORED)}
    run = jax.jit(lambda params: draft_loss(Objective(**MIXED), drafter, params, aux_hidden_states, hidden, rows, base))
    loss, metrics = run(params)
    assert float(loss) == 0.0
    assert not np.any(np.asarray(metrics))


DOCUMENTS = (6, 1, 5, 3)  # lengths; one is too short to have a target
LENGTH = 17  # two positions of padding


def packed_and_apart():
    """The same documents packed into one sequence, and one per sequence."""
    random = np.random.default_rng(7)
    packed = {name: np.zeros((1, LENGTH), np.int32) for name in ("tokens", "labels", "segments")}
    apart = {name: np.zeros((len(DOCUMENTS), LENGTH), np.int32) for name in ("tokens", "labels")}
    packed["labels"][:] = apart["labels"][:] = IGNORED
    start = 0
    for i, length in enumerate(DOCUMENTS):
        tokens = random.integers(VOCAB, size=length)
        labels = np.where(np.arange(length) == 2, IGNORED, tokens)
        packed["segments"][0, start : start + length] = i + 1
        for rows, row, place in ((packed, 0, start), (apart, i, 0)):
            rows["tokens"][row, place : place + length] = tokens
            rows["labels"][row, place : place + length] = labels
        start += length
    return packed, apart


@pytest.mark.quick("hydra++")
@pytest.mark.parametrize("kind", ["hydra", "hydra++", "eagle", "eagle3", "mtp", "gemma4-assistant"])
def test_packed_documents_give_the_sums_of_documents_apart(base, kind):
    drafter = drafter_of(kind)
    params = random_params(drafter, base, seed=2)
    objective = Objective(**MIXED, chunk_tokens=10)
    ones = HeadCounts(jnp.ones(HEADS), jnp.ones(HEADS))

    @jax.jit
    def sums(batch):
        segments = batch.get("segments")
        forward = run_base(base.model, base.params, batch["tokens"], drafter.spec.aux_hidden_layers, segments)
        bound = dataclasses.replace(base, block=forward.block)
        return draft_loss(objective, drafter, params, *forward[1::-1], batch, bound, counts=ones)

    packed, apart = packed_and_apart()
    (loss, metrics), (expected, expected_metrics) = sums(packed), sums(apart)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    counts = (head_counts(rows["labels"], rows.get("segments"), HEADS) for rows in (packed, apart))
    jax.tree.map(np.testing.assert_array_equal, *counts)
    if kind != "hydra":  # the others have attention
        unaware = sums(packed | {"segments": np.ones_like(packed["segments"])})[0]
        assert abs(float(unaware) - float(expected)) > 0.02 * float(expected)


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
