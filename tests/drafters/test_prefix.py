"""The Hydra++ prefix layer: independent of chunking and of rejected tokens."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.forced import forced_logits
from helpers.how import sampling
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.attention import causal_mask
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

WIDTH, VOCAB = 32, 61  # of the `tiny_model` fixture
LENGTH, SLOTS = 12, 24
TREE = TreeTopology.from_choices([[0], [2], [0, 1], [2, 0], [2, 3], [2, 0, 0]])
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32 against float64, after RMSNorm


# Compilation takes nearly all the time of these tests, and LLVM's optimisation half of it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="session", params=["hydra", "medusa"])
def prefixed(request, base, oracle):
    """Return ``(drafter, params, advance, propose, heads in NumPy)``; `propose` returns tokens.

    Parametrised with a window shorter than the texts and without one.
    """
    heads = {"hydra": HydraHeads(3, WIDTH, VOCAB), "medusa": MedusaHeads(3, WIDTH, VOCAB)}[request.param]
    drafter = heads.with_prefix(base.config, {"hydra": None, "medusa": 5}[request.param])
    params = oracle.random_draft_params(drafter, base, seed=11)
    advance = quick_jit(lambda *arrays: drafter.advance(params, *arrays, None, base))
    propose = quick_jit(lambda *arrays: drafter.propose(params, *arrays, TREE, base).tokens)
    in_numpy = oracle.heads(heads, params["heads"], base.params["embedding"], reads_path=request.param == "hydra")
    return drafter, params, advance, propose, in_numpy


def random_text(batch: int, seed: int = 0):
    random = np.random.default_rng(seed)
    aux_hidden_states = random.standard_normal((batch, LENGTH, WIDTH)).astype(np.float32)
    return aux_hidden_states, random.integers(VOCAB, size=(batch, LENGTH), dtype=np.int32)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_prefill_matches_numpy(prefixed, base, oracle, batch):
    drafter, params, advance, propose, in_numpy = prefixed
    aux_hidden_states, tokens = random_text(batch)
    lengths = np.array([LENGTH, 1, 7][:batch], np.int32)
    state = advance(drafter.init_state(batch, SLOTS), aux_hidden_states, tokens, lengths)
    assert state.cache.lengths.tolist() == lengths.tolist()
    root = np.array([3, 5, 60][:batch], np.int32)
    candidates = np.asarray(propose(state, root))
    for row, length in enumerate(lengths):
        refined = oracle.prefix_layer(drafter, params["prefix"], aux_hidden_states[row, :length])
        np.testing.assert_allclose(state.hidden[row], refined[-1], **TOLERANCE)
        in_numpy.check_proposal(TREE, refined[-1], int(root[row]), candidates[row])


@pytest.mark.quick("medusa")
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ragged_chunks_give_the_state_of_one_prefill(prefixed, base, oracle, data):
    """Sequences advance by chunks of different lengths with random padding, as after decode steps."""
    drafter, params, advance, _, _ = prefixed
    batch, width = 3, 4  # one chunk width, so one compilation
    n_chunks = data.draw(st.integers(1, 3), label="chunks")
    counts = [data.draw(st.lists(st.integers(1, width), min_size=batch, max_size=batch)) for _ in range(n_chunks)]
    aux_hidden_states, tokens = random_text(batch, seed=data.draw(st.integers(0, 3)))
    junk = np.random.default_rng(99)
    state, taken = drafter.init_state(batch, SLOTS), np.zeros(batch, int)
    for chunk in counts:
        fed = 9 * junk.standard_normal((batch, width, WIDTH)).astype(np.float32)
        for row, count in enumerate(chunk):
            fed[row, :count] = aux_hidden_states[row, taken[row] : taken[row] + count]
        state = advance(state, fed, np.zeros((batch, width), np.int32), np.array(chunk, np.int32))
        taken += chunk
    assert state.cache.lengths.tolist() == taken.tolist()

    at_once = advance(drafter.init_state(batch, SLOTS), aux_hidden_states, tokens, taken.astype(np.int32))
    state, at_once = jax.device_get((state, at_once))
    np.testing.assert_allclose(state.hidden, at_once.hidden, **TOLERANCE)
    for row, length in enumerate(taken):
        refined = oracle.prefix_layer(drafter, params["prefix"], aux_hidden_states[row, :length])
        np.testing.assert_allclose(state.hidden[row], refined[-1], **TOLERANCE)
        for mine, whole in zip(state.cache.layers[0], at_once.cache.layers[0], strict=True):
            np.testing.assert_allclose(mine[row, :, :length], whole[row, :, :length], **TOLERANCE)


@pytest.mark.quick("hydra")
def test_token_by_token_gives_the_state_of_one_prefill(prefixed):
    drafter, _, advance, propose, _ = prefixed
    aux_hidden_states, tokens = random_text(2)
    state = drafter.init_state(2, SLOTS)
    for t in range(LENGTH):
        state = advance(state, aux_hidden_states[:, t : t + 1], tokens[:, t : t + 1], np.ones(2, np.int32))
    at_once = advance(drafter.init_state(2, SLOTS), aux_hidden_states, tokens, np.full(2, LENGTH, np.int32))
    np.testing.assert_allclose(state.hidden, at_once.hidden, **TOLERANCE)
    root = np.array([8, 9], np.int32)
    proposals = [propose(s, root).tolist() for s in (state, at_once)]
    assert proposals[0] == proposals[1]


def test_uncounted_tokens_have_no_effect(prefixed):
    """Two histories that differ only in rejected tokens give the same state, bit for bit."""
    drafter, _, advance, propose, _ = prefixed
    aux_hidden_states, _ = random_text(2)
    histories = []
    for seed in (1, 2):
        junk = np.random.default_rng(seed)
        state = drafter.init_state(2, SLOTS)
        for start, counts in ((0, [3, 1]), (3, [1, 2]), (6, [4, 3])):
            fed = aux_hidden_states[:, start : start + 4].copy()
            tokens = junk.integers(VOCAB, size=(2, 4), dtype=np.int32)
            for row, count in enumerate(counts):
                fed[row, count:] = junk.standard_normal(fed[row, count:].shape)
            state = advance(state, fed, tokens, np.array(counts, np.int32))
        histories.append(state)
    np.testing.assert_array_equal(histories[0].hidden, histories[1].hidden)
    root = np.array([8, 9], np.int32)
    proposals = [propose(s, root).tolist() for s in histories]
    assert proposals[0] == proposals[1]


@pytest.mark.quick("hydra")
def test_decode_steps_give_the_state_of_the_accepted_tokens(prefixed, base, oracle):
    """After several engine steps with rejections the output equals that of one pass over the tokens."""
    drafter, params, _, _, _ = prefixed
    tree = presets.cartesian([20, 2])  # wide enough that untrained heads are sometimes right
    engine = Engine(base.model, Program(drafter, tree, max_new_tokens=30))
    both = Params(base.params, params)
    lengths = np.array([5, 2], np.int32)
    prompt = np.random.default_rng(0).integers(VOCAB, size=(2, 6), dtype=np.int32)
    state = quick_jit(engine.prefill)(both, prompt, lengths, sampling(None, 2, VOCAB))
    step = quick_jit(engine.decode_step)
    for _ in range(6):
        state = step(both, state)
    assert not state.output.done.any()
    accepted = np.asarray(state.output.accept_lengths)[:, :6]
    assert accepted.min() == 0, "no step rejected everything"
    assert accepted.max() >= 1, "no step accepted anything"
    texts = np.concatenate([prompt, np.zeros((2, 34), np.int32)], axis=1)
    for row, length in enumerate(lengths):
        texts[row, length : length + state.output.lengths[row]] = np.asarray(state.output.tokens)[
            row, : state.output.lengths[row]
        ]
    positions = np.broadcast_to(np.arange(40), texts.shape)
    forward = quick_jit(lambda params, texts: base.model.apply({"params": params}, texts, positions, causal_mask(40)))
    hidden = forward(base.params, texts).hidden
    for row, length in enumerate(lengths + state.output.lengths):
        assert state.draft.cache.lengths[row] == length
        refined = oracle.prefix_layer(drafter, params["prefix"], hidden[row, :length])
        np.testing.assert_allclose(state.draft.hidden[row], refined[-1], **TOLERANCE)


def test_teacher_forced_matches_numpy(prefixed, base, oracle):
    drafter, params, _, _, in_numpy = prefixed
    aux_hidden_states, tokens = random_text(2)
    logits = np.asarray(
        quick_jit(lambda *arrays: forced_logits(drafter, *arrays, base))(params, aux_hidden_states, tokens)
    )
    assert logits.shape == (3, 2, LENGTH, VOCAB)
    for row in range(2):
        refined = oracle.prefix_layer(drafter, params["prefix"], aux_hidden_states[row])
        for k in range(drafter.spec.depth):
            for t in range(LENGTH - k - 1):
                expected = in_numpy.logits(k, refined[t], tokens[row, t + 1 : t + 2 + k].tolist())
                np.testing.assert_allclose(logits[k, row, t], expected, atol=1e-3, rtol=1e-3)


def test_packed_documents_are_independent(prefixed, base, oracle):
    """With positions and a mask per packed row, each document gets the output of a separate pass."""
    drafter, params, _, _, in_numpy = prefixed
    aux_hidden_states, tokens = random_text(2)
    lengths = [(7, 5), (1, 11)]
    positions = np.array([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    owner = np.array([np.repeat([0, 1], row) for row in lengths])
    mask = ((owner[:, :, None] == owner[:, None, :]) & causal_mask(LENGTH))[:, None, None]

    @quick_jit
    def last_head(params, aux_hidden_states, tokens, positions, mask):
        read = drafter.teacher_hidden(params, aux_hidden_states, tokens, base, positions=positions, mask=mask)
        return drafter.head_logits(params, drafter.spec.depth - 1, read[-1], base)

    logits = np.asarray(last_head(params, aux_hidden_states, tokens, positions, mask))
    k = drafter.spec.depth - 1
    for row, (first, _) in enumerate(lengths):
        for start, end in ((0, first), (first, LENGTH)):
            refined = oracle.prefix_layer(drafter, params["prefix"], aux_hidden_states[row, start:end])
            for t in range(start, end - k - 1):
                expected = in_numpy.logits(k, refined[t - start], tokens[row, t + 1 : t + 2 + k].tolist())
                np.testing.assert_allclose(logits[row, t], expected, atol=1e-3, rtol=1e-3)
