"""Compare EAGLE and EAGLE-3 with NumPy versions without trees and caches, and decode with them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import sampling
from helpers.lab import quick_jit
from hydrajax.api import make_decode_fn
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS, heads, kind_of, title_of
from hydrajax.trees.dynamic import DynamicTree

PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [1] * 17]


@pytest.fixture(scope="module", params=["eagle", "eagle, some tokens", "eagle3"])
def drafter(request, base):
    if request.param == "eagle":
        return Eagle.for_base(base.config, jnp.float32)
    kind = Eagle3 if request.param == "eagle3" else Eagle
    return dataclasses.replace(
        kind.for_base(base.config, jnp.float32), vocabulary=Vocabulary(range(0, base.config.vocab_size, 2))
    )


@pytest.fixture(scope="module")
def taught(drafter, base, oracle):
    """Return parameters and a function that proposes after two chunks of ragged lengths.

    ``propose(tree) -> (proposal, texts)``: a text is hidden states and the tokens after the first, root last.
    """
    params, random = oracle.random_draft_params(drafter, base, 1), np.random.default_rng(0)
    lengths, batch = [(7, 3), (4, 1), (1, 4)], 3
    aux_hidden_states = random.normal(
        size=(2, batch, 7, len(drafter.spec.aux_hidden_layers) * base.config.width)
    ).astype(np.float32)
    tokens = random.integers(0, base.config.vocab_size, (2, batch, 7), dtype=np.int32)
    roots = random.integers(0, base.config.vocab_size, batch, dtype=np.int32)
    texts = []
    for row, (first, second) in enumerate(lengths):
        text = [*tokens[0, row, :first], *tokens[1, row, :second]]
        seen = np.concatenate([aux_hidden_states[0, row, :first], aux_hidden_states[1, row, :second]])
        texts.append((seen.astype(np.float64), [int(token) for token in text[1:]]))

    def propose(tree):
        @quick_jit
        def run(params):
            state = drafter.init_state(batch, 24)
            for part, counts in enumerate(np.array(lengths).T):
                last = tokens[1, :, 0] if part == 0 else roots  # the next token
                arguments = aux_hidden_states[part], tokens[part], jnp.asarray(counts), jnp.asarray(last), base
                state = drafter.begin(params, state, *arguments)
            return drafter.propose(params, state, jnp.asarray(roots), tree, base)

        return jax.device_get(run(params)), roots, texts

    return params, propose


@pytest.mark.quick("eagle, some tokens")
def test_static_trees_have_the_best_tokens_after_each_path(drafter, base, taught, oracle):
    params, propose = taught
    plain, tree = oracle.eagle(drafter, params, base), oracle.random_tree(3, 18, depth=4, widest=5)
    proposal, roots, texts = propose(tree)
    for row, text in enumerate(texts):
        plain.check_proposal(tree, text, int(roots[row]), proposal.tokens[row])


@pytest.mark.slow  # test_eagle_golden.py compares them with recordings
def test_dynamic_trees_have_the_best_tokens_after_each_path(drafter, base, taught, oracle):
    params, propose = taught
    plain = oracle.eagle(drafter, params, base)
    proposal, _, texts = propose(DynamicTree(16, 3, 4))
    for row, text in enumerate(texts):
        assert plain.check_grown(text, proposal.tokens[row], proposal.tree.parents[row]) > 1


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("eagle3", "grown"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("eagle", "random"), ("eagle", "grown"), ("eagle3", "random")]
        ),
    ],
)
@pytest.mark.slow
def test_sampling_draws_the_tokens_of_plain_sampling(lab, name, tree):
    rule = ExactSampling(1.3)
    decode_fn = make_decode_fn(lab.model, lab.drafters[name], lab.trees[tree], rule, max_new_tokens=24)
    out = lab.decode(decode_fn, 0, lab.draft(name, 0), PROMPTS, rule=rule, seed=5)
    plain = lab.plainly(PROMPTS, rule, seed=5)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.accept_lengths.max() > 0


def test_a_second_turn_gives_the_tokens_of_the_base(lab):
    """The draft's cache matches the base's, whatever ended the first answer."""
    engine = make_decode_fn(lab.model, lab.drafters["eagle"], lab.trees["grown"], max_new_tokens=9).engine
    params, step = Params(lab.base(0), lab.draft("eagle", 0)), lab.quick_jit(engine.decode_step)
    limits = [4, 9, 1]
    drawn = sampling(None, 3, lab.vocab, limits=limits)

    def finish(state):
        while not state.output.done.all():
            state = step(params, state)
        np.testing.assert_array_equal(state.draft.cache.lengths, state.target.cache.lengths)
        return state, jax.device_get(result_of(state.output)).ids()

    prompts, more = [[3, 1, 4], [2, 6], [9, 2, 6, 5]], [[5, 5], [1], [8, 0, 2]]
    prefill = lab.quick_jit(engine.prefill, static_argnames="slots")
    state, emitted = finish(prefill(params, *padded(prompts), drawn, slots=lab.context + 14))
    whole = [[*prompt, *ids, *text] for prompt, ids, text in zip(prompts, emitted, more, strict=True)]
    _, answers = finish(lab.quick_jit(engine.extend)(params, state, *padded(more), drawn))
    texts, _ = lab.references(0, whole)
    for row, text in enumerate(whole):
        assert answers[row] == lab.expected(texts[row], len(text), limits[row])


def padded(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids ``[rows, 4]``, right-padded, and their lengths."""
    return np.array([text + [0] * (4 - len(text)) for text in texts], np.int32), np.array([*map(len, texts)], np.int32)


@pytest.mark.parametrize("n_layers", [*range(1, 12), 32])
def test_eagle_3_reads_a_low_a_middle_and_a_high_layer(n_layers):
    layers = [n_layers - place for place in default_aux_hidden_layers(n_layers)]
    assert layers == sorted(set(layers))
    assert all(0 <= layer < n_layers for layer in layers)
    if n_layers == 3 or n_layers >= 7:
        assert set(layers) == {2, n_layers // 2, n_layers - 3}


def test_trees_that_eagle_cannot_fill_are_rejected(lab):
    tree = DynamicTree(14, 3, 4)
    with pytest.raises(HydrajaxError, match="got dynamic-14-3-4, expected a static tree"):
        make_decode_fn(lab.model, KINDS["lookup"].build(lab.model.config, jnp.float32), tree)
    with pytest.raises(HydrajaxError, match="tree: got a depth of 12, expected at most the 10 tokens"):
        make_decode_fn(lab.model, lab.drafters["eagle"], DynamicTree(20, 11, 4))
    with pytest.raises(
        HydrajaxError, match="tree: got 18 children per node, expected at most the vocabulary of 17 tokens"
    ):
        make_decode_fn(lab.model, lab.drafters["eagle"], DynamicTree(20, 1, 18))
    make_decode_fn(lab.model, lab.drafters["eagle"], tree, Greedy())


def test_names_and_titles(lab):
    for name, title in (("eagle", "EAGLE"), ("eagle3", "EAGLE-3")):
        assert heads(name) is type(lab.drafters[name])
        assert kind_of(lab.drafters[name]) == name
        assert title_of(lab.drafters[name]) == title
