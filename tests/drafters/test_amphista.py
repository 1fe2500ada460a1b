"""Compare Amphista heads with the paper's equations in NumPy, without trees and caches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.forced import forced_logits
from helpers.how import sampling
from helpers.lab import NEW, quick_jit
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.api import make_decode_fn
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.packed_forward import row_layout, run_base
from hydrajax.train.losses import Objective, draft_loss
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree

VOCAB = 61  # of the `tiny_model` fixture
SMALL = LmHead(rank=7, vocabulary=Vocabulary(range(0, VOCAB, 2)))
VARIANTS = {
    "as in the paper": {},
    "alpha, narrow, small lm heads": {"auto_embedding_layers": 2, "mlp_width": 24, "small_lm_head": SMALL},
    "five heads, three stages, no positions": {
        "num_draft_heads": 5,
        "adaptation_layers": 3,
        "position_encoding": False,
    },
    "one stage, no token, no auto-embedding": {"adaptation_layers": 1, "reads_token": False, "n_layers": 2}
    | {"num_draft_heads": 3, "auto_embedding_layers": 0},
    "without adaptation, the base's lm head": {"adaptation_layers": 0, "small_lm_head": LmHead(True, shared=True)},
}
DECODED = ["alpha, narrow, small lm heads", "without adaptation, the base's lm head"]


def variant(name: str, base) -> AmphistaHeads:
    return dataclasses.replace(AmphistaHeads.for_base(base.config, jnp.float32), **VARIANTS[name])


def in_numpy(oracle, drafter, params, base):
    config = drafter.config.replace(mlp_width=drafter.mlp_width or drafter.config.mlp_width)
    assert config == drafter.layer_config
    return oracle.amphista(drafter, params, base)


@pytest.mark.parametrize(
    "name", ["as in the paper", *(pytest.param(n, marks=pytest.mark.slow) for n in list(VARIANTS)[1:])]
)
def test_teacher_forcing_matches_numpy(base, oracle, name):
    drafter, (batch, length) = variant(name, base), (2, 6)
    params, random = oracle.random_draft_params(drafter, base, 1), np.random.default_rng(0)
    aux_hidden_states = random.normal(size=(batch, length, base.config.width)).astype(np.float32)
    tokens = random.integers(VOCAB, size=(batch, length), dtype=np.int32)
    logits = quick_jit(lambda *arrays: forced_logits(drafter, *arrays, base))(params, aux_hidden_states, tokens)
    assert logits.shape == (drafter.num_draft_heads, batch, length, VOCAB)
    plain = in_numpy(oracle, drafter, params, base)
    for row in range(batch):
        for t in (0, 1, length - 2):  # no true token follows the last position
            text = aux_hidden_states[row, : t + 1].astype(np.float64), tokens[row, 1 : t + 1].tolist()
            for k in range(drafter.num_draft_heads):
                expected = plain.logits(k, text, [int(tokens[row, t + 1])])
                np.testing.assert_allclose(logits[k, row, t], expected, atol=5e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=DECODED)
def taught(request, base, oracle):
    """Return ``(drafter, oracle in NumPy, propose)``; the state has advanced by two chunks of ragged lengths.

    ``propose(tree) -> (proposal, roots, texts)``: a text is hidden states and the tokens after the first, root last.
    """
    drafter = variant(request.param, base)
    params, random = oracle.random_draft_params(drafter, base, 1), np.random.default_rng(0)
    lengths, batch = [(7, 3), (4, 1), (1, 4)], 3
    # Small logits, so that no dynamic tree degenerates to a chain.
    aux_hidden_states = 0.3 * random.normal(size=(2, batch, 7, base.config.width)).astype(np.float32)
    tokens = random.integers(VOCAB, size=(2, batch, 7), dtype=np.int32)
    roots = random.integers(VOCAB, size=batch, dtype=np.int32)
    texts = []
    for row, (first, second) in enumerate(lengths):
        text = [*tokens[0, row, :first], *tokens[1, row, :second]]
        seen = np.concatenate([aux_hidden_states[0, row, :first], aux_hidden_states[1, row, :second]])
        texts.append((seen.astype(np.float64), [int(token) for token in text[1:]]))

    def propose(tree, draw=None):
        @quick_jit
        def run(params):
            state = drafter.init_state(batch, 24)
            for part, counts in enumerate(np.array(lengths).T):
                follows = tokens[1, :, 0] if part == 0 else roots
                arguments = aux_hidden_states[part], tokens[part], jnp.asarray(counts), jnp.asarray(follows), base
                state = drafter.begin(params, state, *arguments)
            return drafter.propose(params, state, jnp.asarray(roots), tree, base, draw), state.cache.lengths

        proposal, taken = jax.device_get(run(params))
        assert taken.tolist() == [sum(pair) for pair in lengths]
        return proposal, roots, texts

    return drafter, in_numpy(oracle, drafter, params, base), propose


@pytest.mark.quick("alpha, narrow, small lm heads")
def test_static_trees_have_the_best_tokens_of_each_head(taught, oracle):
    _, plain, propose = taught
    tree = oracle.random_tree(3, 18, depth=4, widest=5)
    proposal, roots, texts = propose(tree)
    for row, text in enumerate(texts):
        plain.check_proposal(tree, text, int(roots[row]), proposal.tokens[row])
    alone, roots, _ = propose(presets.root())  # as in calibration
    assert alone.tokens[:, 0].tolist() == roots.tolist()


@pytest.mark.quick("without adaptation, the base's lm head")
def test_dynamic_trees_have_the_best_tokens_of_each_head(taught):
    _, plain, propose = taught
    proposal, _, texts = propose(DynamicTree(16, 3, 4))
    for row, text in enumerate(texts):
        assert plain.check_grown(text, proposal.tokens[row], proposal.tree.parents[row]) > 1


@pytest.mark.slow
def test_samples_follow_the_reported_distribution(taught):
    drafter, plain, propose = taught
    keys = jax.random.split(jax.random.key(0), (3, 4))
    proposal, roots, texts = propose(presets.cartesian([3, 2, 1]), Draw(keys, jnp.full(3, 0.7)))
    known = np.arange(VOCAB) if drafter.vocabulary is None else drafter.vocabulary.tokens
    assert np.isin(proposal.tokens[:, 1:], known).all()
    for row, text in enumerate(texts):
        for parent, k in ((0, 0), (1, 1), (4, 2)):  # parents: the root, then its three children, then six of theirs
            expected = plain.logits(k, text, [int(roots[row])]) / 0.7
            np.testing.assert_allclose(proposal.log_q[row, parent], expected, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_packed_documents_are_independent(base, oracle):
    drafter, random = variant("as in the paper", base), np.random.default_rng(3)
    params = oracle.random_draft_params(drafter, base, 2)
    aux_hidden_states = random.normal(size=(1, 9, base.config.width)).astype(np.float32)
    tokens, segments = random.integers(VOCAB, size=(1, 9), dtype=np.int32), np.array([[1] * 5 + [2] * 4], np.int32)

    @quick_jit
    def hidden(aux_hidden_states, tokens, segments):
        return drafter.teacher_hidden(params, aux_hidden_states, tokens, base, None, *row_layout(tokens, segments))

    packed = hidden(aux_hidden_states, tokens, segments)
    for where in (slice(0, 5), slice(5, 9)):
        alone = hidden(aux_hidden_states[:, where], tokens[:, where], np.ones_like(segments[:, where]))
        for k in range(4):  # the last position of a document reads a token of the next one and is no target
            np.testing.assert_allclose(packed[k][:, where][:, :-1], alone[k][:, :-1], atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_every_parameter_learns(base):
    drafter = dataclasses.replace(
        AmphistaHeads.for_base(base.config, jnp.float32), num_draft_heads=2, small_lm_head=SMALL
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(2, 12), dtype=np.int32))
    batch = {"tokens": tokens, "labels": tokens}

    @quick_jit
    def slopes(rng):
        out = run_base(base.model, base.params, tokens)

        def loss(params):
            objective = Objective(lm_weight=0.5, teacher_weight=2.0)
            return draft_loss(objective, drafter, params, out.aux_hidden_states, out.hidden, batch, base)[0]

        return jax.grad(loss)(drafter.init(rng, base))

    for path, leaf in jax.tree.leaves_with_path(slopes(jax.random.key(0))):
        assert float(jnp.max(jnp.abs(leaf))) > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_sampling_draws_the_tokens_of_plain_sampling(lab):
    rule, prompts = ExactSampling(1.3), [[3, 1, 4, 1, 5], [2, 7], [1] * 17]
    decode_fn = make_decode_fn(lab.model, lab.drafters["amphista"], lab.trees["random"], rule, max_new_tokens=NEW)
    out = lab.decode(decode_fn, 0, lab.draft("amphista", 0), prompts, rule=rule, seed=5)
    np.testing.assert_array_equal(out.tokens, lab.plainly(prompts, rule, seed=5).tokens)
    assert out.accept_lengths.max() > 0


@pytest.mark.slow
def test_the_caches_contain_accepted_tokens_only(lab):
    """After steps of any length the state equals that of one prefill of the same tokens."""
    drafter, prompts = lab.drafters["amphista"], [[3, 1, 4], [2, 6], [9, 2, 6, 5]]
    engine = make_decode_fn(lab.model, drafter, lab.trees["skips ranks"], max_new_tokens=16).engine
    params, drawn = Params(lab.base(0), lab.draft("amphista", 0)), sampling(None, 3, lab.vocab, limits=[9, 16, 12])
    prefill, step = lab.quick_jit(engine.prefill, static_argnames="slots"), lab.quick_jit(engine.decode_step)

    def begun(texts):
        padded = np.array([text + [0] * (20 - len(text)) for text in texts], np.int32)
        lengths = np.array([*map(len, texts)], np.int32)
        return prefill(params, padded, lengths, drawn, slots=48)

    state, steps = begun(prompts), 3
    for _ in range(steps):
        state = step(params, state)
    # Prefill the emitted tokens as prompts; the next step emits the current root.
    texts, _ = lab.references(0, prompts)
    lengths = state.draft.cache.lengths.tolist()
    np.testing.assert_array_equal(lengths, state.target.cache.lengths)
    assert sum(lengths) > sum(map(len, prompts)) + 3 * steps  # a draft was accepted
    again = begun([texts[row, :length].tolist() for row, length in enumerate(lengths)])
    np.testing.assert_allclose(state.draft.adapted, again.draft.adapted, atol=1e-4, rtol=1e-4)
    mine, whole = jax.tree.leaves(state.draft.cache.layers), jax.tree.leaves(again.draft.cache.layers)
    assert len(mine) == 4  # keys and values of two layers
    for row, length in enumerate(lengths):
        for ours, theirs in zip(mine, whole, strict=True):
            np.testing.assert_allclose(ours[row, :, :length], theirs[row, :, :length], atol=1e-4, rtol=1e-4)


def test_bad_settings_are_rejected(base):
    for layers in (-1, 5):
        with pytest.raises(HydrajaxError, match=f"adaptation_layers: got {layers}, expected 0 to num_draft_heads, 4"):
            dataclasses.replace(AmphistaHeads.for_base(base.config, jnp.float32), adaptation_layers=layers)
    heads = AmphistaHeads.for_base(base.config, jnp.float32)
    with pytest.raises(HydrajaxError, match="by the settings"):
        heads.trained_on(dataclasses.replace(AmphistaHeads.for_base(base.config, jnp.float32), auto_embedding_layers=2))
    assert heads.trained_on(AmphistaHeads.for_base(base.config, jnp.float32)) == heads
