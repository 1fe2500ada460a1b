"""`Way`: one class for every way to decode, its baseline, and calibration and contests that are given one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import hydrajax
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.measure.calibration import calibrate
from hydrajax.measure.contest import measure_trees
from hydrajax.measure.way import Way, baseline_rule, promises_same_output
from hydrajax.models.base import BoundBase
from hydrajax.trees import presets
from hydrajax.trees.search import simulated

PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 6, 5)]


@pytest.fixture(scope="module")
def way(tiny_model) -> Way:
    model, base = tiny_model
    drafter = MedusaHeads.for_base(model.config, model.dtype, n_heads=2)
    params = Params(base, drafter.init(jax.random.key(0), BoundBase(model, base)))
    return Way("chain", model, drafter, params, presets.chain(2), max_new_tokens=12)


def test_it_decodes_as_the_function_it_stands_for(way):
    prompt, lengths = np.stack([PROMPTS[1], PROMPTS[1][::-1]]), np.array([6, 4], np.int32)
    decode_fn = hydrajax.make_autoregressive_fn(way.model, max_new_tokens=12)
    expected = decode_fn(Params(way.params.base, {}), prompt, lengths)
    np.testing.assert_array_equal(way.decode(prompt, lengths).tokens, expected.tokens)
    assert way.decode_fn is way.decode_fn  # made, and so compiled, once


def test_names_and_trees(way):
    wide = way.with_tree(presets.cartesian([2, 2]), "wide")
    assert [(w.name, w.nodes) for w in (way, way.autoregressive(), wide)] == [
        ("chain", 3),
        ("autoregressive", 1),
        ("wide", 7),
    ]
    assert way.autoregressive().params.draft == {}
    with pytest.raises(HydrajaxError, match="depth 3 is deeper than the drafter"):
        way.with_tree(presets.chain(3), "deep").decode(PROMPTS[0][None])


@pytest.mark.parametrize(
    ("rule", "plain", "same"),
    [
        (Greedy(), Greedy(), True),
        (ExactSampling(0.7, top_k=3), ExactSampling(0.7, top_k=3), True),
        (RejectionSampling(0.7, top_k=5, min_p=0.1), ExactSampling(0.7, top_k=5, min_p=0.1), False),
        (Typical(), Greedy(), False),
    ],
)
def test_the_baseline_s_rule(rule, plain, same):
    assert baseline_rule(rule) == plain
    assert promises_same_output(rule) is same


def test_a_calibration_foretells_what_a_contest_finds(way):
    """On the very prompts it was made with, in batches of which the last is not full."""
    found = calibrate(way, PROMPTS, batch_size=2)
    assert [(row, start) for row, start, _ in found.spans] == [(0, 4), (1, 6), (2, 5)]
    assert all(end - start == 12 for _, start, end in found.spans)
    proposals = simulated(found.ranks, found.spans, 4)
    size = proposals.largest
    (measured,) = measure_trees(way, {"grown": proposals.tree(size)}, PROMPTS, batch_size=1, repeats=1)
    assert measured.tokens_per_step == pytest.approx(proposals.tokens_per_step[size - 1])
    assert measured.equal
