"""Target masks of the losses: gaps, micro-batches and packed documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.loss_examples import HEADS, MIXED, VOCAB, WIDTH, drafter_of, random_params
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train.losses import IGNORED, HeadCounts, Objective, draft_loss, head_counts, targets


@pytest.fixture
def base(tiny_model):
    return BoundBase(*tiny_model)


def test_ignored_targets_do_not_count(base, example):
    aux_hidden_states, hidden, batch = example
    drafter = MedusaHeads(1, WIDTH, VOCAB)
    params = random_params(drafter, base)

    def loss(aux_hidden_states):
        return draft_loss(Objective(**MIXED), drafter, params, aux_hidden_states, hidden, batch, base)[0]

    gradient = np.abs(jax.jit(jax.grad(loss))(aux_hidden_states)).sum(axis=-1)
    # Head 0 at t predicts token t + 2 and hidden state t + 1.
    labels = np.pad(batch["labels"], ((0, 0), (0, 2)), constant_values=IGNORED)
    used = (labels[:, 2:] != IGNORED) | (labels[:, 1:-1] != IGNORED)
    assert 0 < used.sum() < used.size
    np.testing.assert_array_equal(gradient > 0, used)


def test_no_target_at_all_is_zero_and_not_nan(base, example):
    aux_hidden_states, hidden, batch = example
    labels = np.full_like(batch["labels"], IGNORED)
    drafter = MedusaHeads(1, WIDTH, VOCAB)
    rows = {"tokens": batch["tokens"], "labels": labels}
    loss, metrics = jax.jit(
        lambda params: draft_loss(Objective(**MIXED), drafter, params, aux_hidden_states, hidden, rows, base)
    )(random_params(drafter, base))
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
@pytest.mark.parametrize("kind", ["hydra", "hydra++", "eagle", "eagle3", "mtp"])
def test_packed_documents_give_the_sums_of_documents_apart(base, kind):
    drafter = drafter_of(kind)
    params = random_params(drafter, base, seed=2)
    objective = Objective(**MIXED, chunk_tokens=10)
    ones = HeadCounts(jnp.ones(HEADS), jnp.ones(HEADS))

    @jax.jit
    def sums(batch):
        forward = run_base(
            base.model, base.params, batch["tokens"], drafter.spec.aux_hidden_layers, batch.get("segments")
        )
        return draft_loss(objective, drafter, params, *forward[1::-1], batch, base, counts=ones)

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


def test_targets_stay_in_their_segment():
    labels = np.arange(10, 18)[None]
    segments = np.array([[1, 1, 1, 2, 2, 0, 0, 0]])
    tokens, counts = targets(jnp.asarray(labels), 1, jnp.asarray(segments))
    assert counts.tolist() == [[True, True, False, True, False, False, False, False]]
    assert tokens[counts].tolist() == [11, 12, 14]
    assert targets(jnp.asarray(labels), 2, jnp.asarray(segments))[1].tolist() == [[True] + [False] * 7]
