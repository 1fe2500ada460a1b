"""Calibration against a contest with the predicted trees."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from hydrajax.bench.calibration import calibrate
from hydrajax.bench.contests.contest import measure_trees
from hydrajax.bench.trees.search import simulated
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import presets

PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 6, 5)]


def test_a_calibration_predicts_the_tokens_per_step_of_a_contest(tiny_model):
    """On the same prompts, in batches of which the last is not full."""
    model, base = tiny_model
    drafter = dataclasses.replace(MedusaHeads.for_base(model.config, model.dtype), num_draft_heads=2)
    params = Params(base, jax.jit(lambda: drafter.init(jax.random.key(0), BoundBase(model, base)))())
    executor = FusedExecutor(model, params, Program(drafter, presets.chain(2), max_new_tokens=12))
    found = calibrate(executor, PROMPTS, batch_size=2)
    assert [(row, start) for row, start, _ in found.spans] == [(0, 4), (1, 6), (2, 5)]
    assert all(end - start == 12 for _, start, end in found.spans)
    proposals = simulated(found.ranks, found.spans, 4)
    size = proposals.largest
    (measured,) = measure_trees(executor, {"grown": proposals.tree(size)}, PROMPTS, batch_size=1, repeats=1)
    assert measured.tokens_per_step == pytest.approx(proposals.tokens_per_step[size - 1])
    assert measured.equal
