"""Greedy and sampled rows in one batch: each row's tokens are those of its own rule, decoded apart."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.decode import make_decode_fn
from hydrajax.decoding.either import GreedyOrExact
from hydrajax.decoding.sampling import per_row
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets

PROMPTS = [[3, 1, 4], [5, 9], [2, 6, 5, 3], [8]]
# Rows 0 and 2 are greedy. The numbers of a row that is one of many which use them all must not change its own.
NUMBERS = [
    {},
    {"temperature": 1.3},
    {"top_k": 3},  # of no effect on a greedy row
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]
PENALTIES = [{"presence_penalty": 1.0}, {}, {"repetition_penalty": 1.4}, {"frequency_penalty": 0.7}]


@pytest.mark.slow
@pytest.mark.parametrize("penalties", [False, True], ids=["plain", "penalties"])
def test_every_row_has_the_tokens_of_its_own_rule(lab, penalties):
    numbers = [own | (more if penalties else {}) for own, more in zip(NUMBERS, PENALTIES, strict=True)]
    rules = [GreedyOrExact.in_full(lab.vocab, penalties=penalties, **own) for own in numbers]
    tree = presets.cartesian([3, 2])
    decode_fn = make_decode_fn(lab.model, lab.drafters["hydra"], tree, rules[0], max_new_tokens=20)
    mixed = lab.decode(decode_fn, 0, lab.draft("hydra", 0), PROMPTS, rule=rules, seed=4)
    assert mixed.accept_lengths.max() >= 1
    all_greedy = [rules[0], rules[0], rules[2], rules[2]]
    greedy = lab.decode(decode_fn, 0, lab.draft("hydra", 0), PROMPTS, rule=all_greedy, seed=4)
    for row, own in enumerate(numbers):
        if own.get("temperature"):
            rule = ExactSampling(**own)
        else:
            rule = Greedy(**{name: value for name, value in own.items() if name != "top_k"})
            np.testing.assert_array_equal(greedy.tokens[row], mixed.tokens[row])
        alone = lab.plainly(PROMPTS, rule, seed=4)  # keys are those of the row's number
        np.testing.assert_array_equal(mixed.tokens[row], alone.tokens[row][:20])


def test_numbers_without_effect_change_no_bit():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 6, (2, 500)), jnp.float32)
    rules = [GreedyOrExact.in_full(500, penalties=True, temperature=t) for t in (0.7, 1.9)]
    found = per_row(rules, 2).shape(logits)
    for row, temperature in enumerate((0.7, 1.9)):
        np.testing.assert_array_equal(found[row], ExactSampling(temperature).shape(logits[row]))


def test_numbers_out_of_range_are_refused():
    for number in (-1.0, float("inf"), float("nan")):
        with pytest.raises(HydrajaxError, match=f"temperature: must be at least 0 and finite, found {number}"):
            GreedyOrExact(number)
    with pytest.raises(HydrajaxError, match="top_p: must be above 0 and at most 1, found 3"):
        GreedyOrExact(top_p=3)
    with pytest.raises(HydrajaxError, match="repetition_penalty: must be positive"):
        GreedyOrExact(repetition_penalty=0)
