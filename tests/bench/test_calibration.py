"""Calibration against a contest with the predicted trees; acceptance of a draft model (Leviathan et al. 3.1, 3.2)."""

import dataclasses

import jax
import numpy as np
import pytest

from helpers.noise import noise
from hydrajax.bench.calibration import calibrate
from hydrajax.bench.contests.contest import contest
from hydrajax.bench.trees import search
from hydrajax.bench.trees.search import simulated
from hydrajax.bench.trees.speculation import estimate
from hydrajax.bench.uncached_forward import all_logits
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.trees import presets

PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 6, 5)]


@pytest.mark.slow
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
    entrants = {"plain": executor.autoregressive(), "grown": executor.with_program(tree=proposals.tree(size))}
    _, measured = contest(entrants, PROMPTS, batch_size=1, repeats=1)
    assert measured.tokens_per_step == pytest.approx(proposals.tokens_per_step[size - 1])
    assert measured.equal


@pytest.fixture(scope="module")
def executor(tiny_model) -> FusedExecutor:
    """A base with 61 tokens and a draft with 50 of them."""
    model, base = tiny_model
    small = Llama(model.config.replace(vocab_size=50, n_layers=1))
    params = noise(jax.eval_shape(lambda: init_base(small, jax.random.key(0))), 3)
    program = Program(DraftModel(small, 61), presets.chain(2), max_new_tokens=12)
    return FusedExecutor(model, Params(base, params), program)


def softmax(logits, temperature):
    p = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return p / p.sum(-1, keepdims=True)


@pytest.mark.slow
def test_overlaps_are_acceptance_probabilities(executor):
    """The mean over x drawn from q of min(1, p(x) / q(x)), token by token."""
    executor = executor.with_request(rule=RejectionSampling(0.9, top_k=7, draft_temperature=1.3))
    found = calibrate(executor, PROMPTS, batch_size=2, seed=4)
    chances = []
    assert [(start, end) for _, start, end in found.spans] == [(len(prompt), len(prompt) + 12) for prompt in PROMPTS]
    for text, start in texts_of(executor, 4):
        p_logits = all_logits(executor.model, executor.params.base, text).astype(np.float64)
        kept = np.sort(p_logits, axis=-1)[:, -7:-6]
        p = softmax(np.where(p_logits >= kept, p_logits, -np.inf), 0.9)
        q = softmax(all_logits(executor.program.drafter.model, executor.params.draft, text).astype(np.float64), 1.3)
        for place in range(start, len(text) - 1):
            chances.append(sum(q[place, x] * min(1, p[place, x] / q[place, x]) for x in range(50)))
    assert found.acceptance == pytest.approx(np.mean(chances), abs=1e-5)
    assert 0 < found.acceptance < 1


def texts_of(executor, seed):
    """The sequences that `calibrate` generates, in its batches of two, each with the length of its prompt."""
    texts = []
    for first, some in ((0, PROMPTS[:2]), (2, [PROMPTS[2]] * 2)):
        lengths = np.array([len(prompt) for prompt in some], np.int32)
        prompt = np.stack([np.pad(ids, (0, max(map(len, PROMPTS)) - len(ids))) for ids in some])
        key = jax.random.fold_in(jax.random.key(seed), first)
        out = jax.device_get(executor.autoregressive().decode(prompt, lengths, key))
        texts += [(np.append(ids, out.tokens[row]), len(ids)) for row, ids in enumerate(some)]
    return texts[: len(PROMPTS)]


@pytest.mark.slow
def test_greedy_acceptance_is_the_share_of_equal_tokens(executor):
    found = calibrate(executor, PROMPTS, batch_size=2)
    same = []
    for text, start in texts_of(executor, 0):
        guesses = np.argmax(all_logits(executor.program.drafter.model, executor.params.draft, text), axis=-1)
        same += (guesses[start:-1] == text[start + 1 :]).tolist()
    assert found.overlaps is None
    assert found.acceptance == pytest.approx(np.mean(same))


def test_the_best_chain_by_the_closed_form(executor):
    found = estimate(0.5, 0.1, 16)
    gains = [(2 - 0.5**k) / (0.1 * k + 1) for k in range(17)]
    assert (found.length, found.improvement) == (int(np.argmax(gains)), pytest.approx(max(gains)))
    assert f"chain-{found.length} should be the best chain" in str(found)
    assert "no chain should pay" in str(estimate(0.1, 0.2, 16))
    proposals = search.chains(0.5, 16, 4)
    assert [proposals.tree(size) for size in (1, 2, 3, 4)] == [presets.chain(k) for k in range(4)]
    assert proposals.tokens_per_step == pytest.approx((1, 1.5, 1.75, 1.875))
