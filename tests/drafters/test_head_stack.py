"""Compare Medusa and Hydra heads with NumPy at every node and position."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.forced import forced_logits
from hydrajax.drafters.drafter import last_observed
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

WIDTH, VOCAB = 32, 61  # of the `tiny_model` fixture
DRAFTERS = {
    "medusa": MedusaHeads(4, WIDTH, VOCAB),
    "medusa, 3 blocks": MedusaHeads(4, WIDTH, VOCAB, n_layers=3, share_blocks=False),
    "medusa, shared block and bias": MedusaHeads(4, WIDTH, VOCAB, n_layers=2, lm_head_bias=True),
    "hydra": HydraHeads(4, WIDTH, VOCAB),
    "hydra, 3 shared layers": HydraHeads(4, WIDTH, VOCAB, n_layers=3),
    "hydra, 3 layers": HydraHeads(4, WIDTH, VOCAB, n_layers=3, share_blocks=False),
}
TREES = {
    "skips ranks": TreeTopology.from_choices([[1], [1, 2], [4], [4, 0], [4, 3], [1, 2, 5]]),
    "sparse": presets.sparse(),
}


@pytest.fixture(scope="session", params=DRAFTERS)
def heads(request, base, oracle):
    """A drafter, its parameters and its NumPy version."""
    drafter = DRAFTERS[request.param]
    params = oracle.random_draft_params(drafter, base, seed=len(request.param))
    in_numpy = oracle.heads(drafter, params, base.params["embedding"], reads_path=isinstance(drafter, HydraHeads))
    return drafter, params, in_numpy


def propose(drafter, params, state, root, tree, base):
    """Return a jitted function that all tests share."""
    if (drafter, tree) not in compiled:
        compiled[drafter, tree] = quick_jit(lambda *arrays: drafter.propose(*arrays, tree, base).tokens)
    return np.array(compiled[drafter, tree](params, state, root))


def teacher_forced(drafter, params, aux_hidden_states, tokens, base):
    return np.asarray(
        quick_jit(lambda *arrays: forced_logits(drafter, *arrays, base))(params, aux_hidden_states, tokens)
    )


# Compilation takes nearly all the time of these tests, and LLVM's optimisation half of it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
compiled = {}


def propose_and_check(heads, base, tree, batch, seed):
    drafter, params, in_numpy = heads
    random = np.random.default_rng(seed)
    state = random.standard_normal((batch, WIDTH)).astype(np.float32)
    root = random.integers(VOCAB, size=batch, dtype=np.int32)
    candidates = propose(drafter, params, state, root, tree, base)
    assert candidates.shape == (batch, tree.size)
    assert candidates.dtype == np.int32
    for row in range(batch):
        in_numpy.check_proposal(tree, state[row], int(root[row]), candidates[row])


@pytest.mark.parametrize(("name", "batch"), [("skips ranks", 1), ("skips ranks", 3), ("sparse", 3)])
@pytest.mark.quick(
    "hydra, 3 shared layers-skips ranks-3",
    "hydra, 3 layers-sparse-3",
    "hydra-skips ranks-1",
    "medusa, shared block and bias-skips ranks-3",
    "medusa, 3 blocks-sparse-3",
    "medusa-skips ranks-1",
)
def test_propose_matches_numpy(heads, base, name, batch):
    propose_and_check(heads, base, TREES[name], batch, seed=batch)


@pytest.mark.parametrize("name", ["medusa", "hydra, 3 shared layers"])
@pytest.mark.quick("medusa")
def test_dynamic_trees_have_the_best_tokens_after_each_path(base, oracle, name):
    drafter, tree, batch = DRAFTERS[name], DynamicTree(18, 3, 4), 3
    params = oracle.random_draft_params(drafter, base, seed=5)
    in_numpy = oracle.heads(drafter, params, base.params["embedding"], reads_path=isinstance(drafter, HydraHeads))
    random = np.random.default_rng(2)
    # Small logits, so that no tree degenerates to a chain.
    state = 0.2 * random.standard_normal((batch, WIDTH)).astype(np.float32)
    root = random.integers(VOCAB, size=batch, dtype=np.int32)
    proposal = jax.device_get(quick_jit(lambda *arrays: drafter.propose(*arrays, tree, base))(params, state, root))
    for row in range(batch):
        assert in_numpy.check_grown(state[row], proposal.tokens[row], proposal.tree.parents[row]) > 1


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 16), st.sampled_from([1, 3]))
def test_propose_matches_numpy_on_random_trees(base, oracle, tree_seed, n_choices, batch):
    """Every tree is compiled, so there are few examples, with Hydra because of its level batching."""
    tree = oracle.random_tree(tree_seed, n_choices, depth=4, widest=6)
    drafter = DRAFTERS["hydra, 3 shared layers"]
    params = oracle.random_draft_params(drafter, base, seed=1)
    in_numpy = oracle.heads(drafter, params, base.params["embedding"], reads_path=True)
    propose_and_check((drafter, params, in_numpy), base, tree, batch, tree_seed)


@pytest.mark.quick("hydra, 3 shared layers")
def test_the_numpy_check_can_fail(heads, base):
    """Swapped siblings, or child counts read as ranks, must fail the check."""
    drafter, params, in_numpy = heads
    state = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    root = np.array([7], np.int32)
    tree = TREES["skips ranks"]
    good = propose(drafter, params, state, root, tree, base)[0]
    swapped = good.copy()
    swapped[[1, 2]] = good[[2, 1]]
    closed_up = TreeTopology.from_choices([[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 0]])
    counted = propose(drafter, params, state, root, closed_up, base)[0]
    for wrong in (swapped, counted):
        with pytest.raises(AssertionError):
            in_numpy.check_proposal(tree, state[0], 7, wrong)


def test_teacher_forced_matches_numpy_along_the_true_tokens(heads, base):
    """Head k at position t reads hidden state t and the true tokens t+1 ... t+1+k, as `propose` reads its guesses."""
    drafter, params, in_numpy = heads
    random = np.random.default_rng(3)
    batch, length = 2, 9
    aux_hidden_states = random.standard_normal((batch, length, WIDTH)).astype(np.float32)
    tokens = random.integers(VOCAB, size=(batch, length), dtype=np.int32)
    logits = teacher_forced(drafter, params, aux_hidden_states, tokens, base)
    assert logits.shape == (drafter.spec.depth, batch, length, VOCAB)
    for k in range(drafter.spec.depth):
        for row in range(batch):
            for t in range(length - k - 1):  # later positions have no true token t+1+k
                expected = in_numpy.logits(k, aux_hidden_states[row, t], tokens[row, t + 1 : t + 2 + k].tolist())
                np.testing.assert_allclose(logits[k, row, t], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.quick("hydra, 3 layers", "medusa, shared block and bias")
def test_teacher_forcing_reproduces_a_proposal(heads, base):
    """Teacher forcing on a proposed chain predicts the chain: training and decoding have the same inputs."""
    drafter, params, _ = heads
    state = np.random.default_rng(4).standard_normal((3, WIDTH)).astype(np.float32)
    root = np.array([0, 30, 60], np.int32)
    chain = propose(drafter, params, state, root, presets.chain(4), base)
    # Position 0 has the hidden state; tokens before the root do not matter.
    tokens = np.concatenate([np.zeros((3, 1), np.int32), chain], axis=1)
    aux_hidden_states = np.repeat(state[:, None], tokens.shape[1], axis=1)
    logits = teacher_forced(drafter, params, aux_hidden_states, tokens, base)
    assert np.argmax(logits[:, :, 0], axis=-1).T.tolist() == chain[:, 1:].tolist()


def test_only_the_last_counted_hidden_state_is_kept(heads, base):
    drafter, params, _ = heads
    aux_hidden_states = np.random.default_rng(5).standard_normal((3, 6, WIDTH)).astype(np.float32)
    counts = np.array([1, 6, 3], np.int32)
    state = drafter.begin(
        params, drafter.init_state(3, 16), aux_hidden_states, np.zeros((3, 6), np.int32), counts, None, base
    )
    np.testing.assert_array_equal(state, [aux_hidden_states[0, 0], aux_hidden_states[1, 5], aux_hidden_states[2, 2]])
    np.testing.assert_array_equal(last_observed(aux_hidden_states, counts), state)


@pytest.mark.quick("medusa", "hydra, 3 layers")
@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra, 3 layers"])
def test_fresh_heads_start_from_the_base(base, name):
    """W1 = 0 and W2 = the base's lm head (medusa 2.1.1): a fresh head ranks tokens as the base does from h."""
    drafter = DRAFTERS[name]
    params = quick_jit(lambda rng: drafter.init(rng, base))(jax.random.key(0))
    state = np.random.default_rng(6).standard_normal((2, WIDTH)).astype(np.float32)
    tree = presets.cartesian([3, 1])
    candidates = propose(drafter, params, state, np.array([1, 2], np.int32), tree, base)
    expected = np.argsort(-(state.astype(np.float64) @ np.asarray(base.params["lm_head"], np.float64)), axis=-1)
    assert candidates[:, 1:4].tolist() == expected[:, :3].tolist()
    assert candidates[:, 4:].tolist() == np.repeat(expected[:, :1], 3, axis=1).tolist()


def test_no_drafter_proposes_the_root_alone(base):
    drafter = NoDrafter()
    assert drafter.init(jax.random.key(0), base) == {}
    root = np.array([4, 9], np.int32)
    assert drafter.propose({}, drafter.init_state(2, 8), root, presets.root(), base).tokens.tolist() == [[4], [9]]
    assert drafter.ranks({}, None, {"tokens": np.zeros((2, 5), np.int32)}, base, 8, 0).shape == (0, 2, 5)
