"""Compare the sampled distribution with the warpers of transformers; random keys per sequence and position."""

import itertools

import jax
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from helpers.how import per_row
from helpers.refusals import refusal
from hydrajax.decoding.parameters import is_mixed
from hydrajax.decoding.random_keys import position_keys, row_keys
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling, Sampling
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError


def warped(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """Return the distribution of `transformers.generate(do_sample=True)` in float64, as float32 sums are inexact."""
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits, dtype=torch.float64))
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return torch.softmax(scores, dim=-1).numpy()


# One program for all numbers of a kind of rule.
distribution = jax.jit(lambda rule, logits: jax.nn.softmax(rule.shape(logits), axis=-1))


def test_distribution_equals_transformers():
    """Rows range from peaked to flat: the nucleus has one token in some and most of the vocabulary in others."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(6, 3000)).astype(np.float32) * np.array([[0.01, 0.3, 1, 3, 10, 100]], np.float32).T
    for temperature, top_k, top_p in itertools.product(
        (0.3, 1.0, 2.5), (None, 1, 7, 300, 5000), (1.0, 0.95, 0.5, 1e-6)
    ):
        rule = ExactSampling(temperature, top_k, top_p)  # shaped like `Sampling`
        found = np.asarray(distribution(per_row(rule, len(logits)), logits))
        expected = warped(logits, temperature, min(top_k, 3000) if top_k else None, top_p)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-7, err_msg=str(rule))


def test_min_p_per_sequence_equals_transformers():
    """Rows range from peaked to flat, each with its own number: 1.0 keeps only the best token, 1e-30 all."""
    random = np.random.default_rng(1)
    logits = random.normal(size=(6, 3000)).astype(np.float32) * np.array([[0.3, 1, 3, 3, 1, 0.3]], np.float32).T
    numbers = [0.3, 0.02, 1e-3, 1.0, 1e-30, 0.9]
    for top_k, top_p in ((None, 1.0), (7, 1.0), (300, 0.9)):
        rules = [ExactSampling(0.8, top_k, top_p, min_p=number) for number in numbers]
        found = np.asarray(distribution(per_row(rules, 6), logits))
        rows = zip(logits, numbers, strict=True)
        expected = [warped(row[None], 0.8, top_k, top_p, number)[0] for row, number in rows]
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-7)
        kept = (found > 0).sum(axis=1)
        assert kept[3] == 1 < kept[0]


def test_a_neutral_min_p_is_not_in_the_program():
    logits = np.zeros((2, 5), np.float32)
    shapes = [jax.make_jaxpr(rule.shape)(logits) for rule in (ExactSampling(0.7), ExactSampling(0.7, min_p=0.0))]
    assert str(shapes[0]) == str(shapes[1])
    assert jax.tree.structure(ExactSampling(0.7)) == jax.tree.structure(ExactSampling(0.7, min_p=0.0))
    assert "min_p" not in str(ExactSampling(0.7))
    assert str(jax.make_jaxpr(ExactSampling(0.7, min_p=0.1).shape)(logits)) != str(shapes[0])
    assert "min_p=0.1" in str(ExactSampling(0.7, min_p=0.1))


def test_ties_are_kept_or_cut_together():
    logits = np.log(np.array([[0.2, 0.3, 0.3, 0.2]], np.float32))
    for top_k, top_p in ((2, 1.0), (None, 0.4), (2, 0.5), (1, 0.9)):
        assert np.isfinite(Sampling(1.0, top_k, top_p).shape(logits)).tolist() == [[False, True, True, False]]


def test_top_p_counts_all_ties_of_top_k():
    """Top-k 2 keeps four equal tokens of 0.25; half of *their* probability takes two, which tie with all."""
    logits = np.zeros((1, 4), np.float32)
    assert np.isfinite(Sampling(1.0, 2, 0.5).shape(logits)).all()
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    # top-k 2 keeps 0.4 and the three ties; 0.4 is less than half of their sum.
    assert np.isfinite(Sampling(1.0, 2, 0.39).shape(logits)).tolist() == [[True, False, False, False]]
    assert np.isfinite(Sampling(1.0, 2, 0.5).shape(logits)).all()


def test_numbers_out_of_range_are_rejected():
    for settings, expected in (
        ({"temperature": -1.0}, "a finite number from 0 up"),
        ({"temperature": float("nan")}, "a finite number from 0 up"),
        ({"temperature": float("inf")}, "a finite number from 0 up"),
        ({"top_k": 0}, "an integer from 1 up"),
        ({"top_k": True}, "an integer from 1 up"),
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"top_p": 1.1}, "above 0 and at most 1"),
        ({"top_p": float("nan")}, "above 0 and at most 1"),
        ({"min_p": -0.1}, "a number from 0 to 1"),
        ({"min_p": 1.1}, "a number from 0 to 1"),
        ({"min_p": float("nan")}, "a number from 0 to 1"),
    ):
        ((name, value),) = settings.items()
        refusal(lambda settings=settings: Sampling(**settings), f"{name}: got {value}, expected {expected}")


def test_numbers_that_float32_cannot_hold_are_limits():
    for extreme, limit in (
        (ExactSampling(1e-39), ExactSampling(0.0)),
        (ExactSampling(9e-6, 3, 0.5), ExactSampling(0.0, 3, 0.5)),
        (ExactSampling(1.0, top_p=1e-44), ExactSampling(1.0, top_p=1e-30)),
        (ExactSampling(1e39), ExactSampling(1e9)),
        (ExactSampling(10**400), ExactSampling(1e9)),
        (ExactSampling(1.0, 2**40), ExactSampling(1.0, 2**31 - 1)),
        (RejectionSampling(1e-39, draft_temperature=1e-39), RejectionSampling(0.0, draft_temperature=1e-5)),
        (Typical(0.1, 1e39, 1e-39), Typical(0.1, 1e9, 1e-5)),
    ):
        assert extreme == limit
        assert is_mixed(extreme) == is_mixed(limit)  # at temperature 0 the rule is greedy


def test_the_limits_leave_logits_finite():
    logits = np.random.default_rng(0).normal(0, 30, (1, 500)).astype(np.float32)
    for rule in (ExactSampling(1e-5), ExactSampling(1e39), ExactSampling(1.0, top_p=1e-44)):
        probs = distribution(per_row(rule, 1), logits)
        np.testing.assert_allclose(probs.sum(), 1, rtol=1e-4)
    assert (probs == 1).argmax() == logits.argmax()


def test_numbers_without_effect_change_no_bit():
    """In a batch with other numbers the logits are the same as alone."""
    logits = np.random.default_rng(0).normal(0, 6, (3, 500)).astype(np.float32)
    rules = [ExactSampling(0.7), ExactSampling(1.9), ExactSampling(1.0, 7, 0.8, min_p=0.1)]
    shaped = jax.jit(lambda rule, logits: rule.shape(logits))
    found = shaped(per_row(rules, 3), logits)
    for row in range(3):
        np.testing.assert_array_equal(found[row], shaped(per_row(rules[row], 1), logits[row : row + 1])[0])


def test_temperature_0_takes_the_most_likely_token():
    logits = np.random.default_rng(1).normal(0, 1, (3, 50)).astype(np.float32)
    rule = per_row([ExactSampling(0.0), ExactSampling(1.0), ExactSampling(0.0)], 3)
    keys = jax.random.split(jax.random.key(0), (40, 3))
    drawn = np.asarray(jax.vmap(lambda keys: rule.choose(keys, logits))(keys))
    assert (drawn[:, [0, 2]] == logits.argmax(axis=1)[[0, 2]]).all()
    assert len(set(drawn[:, 1].tolist())) > 5


def test_keys_depend_on_sequence_and_position():
    key = jax.random.key(3)
    four, two = row_keys(key, 4), row_keys(key, 2)
    assert (jax.random.key_data(four[:2]) == jax.random.key_data(two)).all()
    assert (jax.random.key_data(row_keys(four, 4)) == jax.random.key_data(four)).all()
    assert (jax.random.key_data(row_keys(jax.random.PRNGKey(3), 4)) == jax.random.key_data(four)).all()
    positions = np.array([[5, 6, 7], [0, 1, 2], [5, 6, 7], [9, 9, 9]])
    keys = jax.random.key_data(position_keys(four, positions))
    assert keys.shape[:2] == (4, 3)
    assert len({tuple(found) for found in np.asarray(keys).reshape(12, -1).tolist()}) == 10  # position 9 occurs thrice
    single = jax.random.key_data(position_keys(four[2:3], np.array([6])))
    assert (single[0] == keys[2, 1]).all()
    with pytest.raises(HydrajaxError, match="rng: got 4 keys for 3 prompts, expected one or one per prompt"):
        row_keys(four, 3)
