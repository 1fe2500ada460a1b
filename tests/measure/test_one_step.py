"""Steps that are looked at: the text is that of decoding, and what is drawn of a tree is what the draft held likely."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.noise import noise
from hydrajax import DecodeSpec, Params, Typical
from hydrajax.api import make_autoregressive_fn
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.lookahead import Lookahead
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.with_lookup import WithLookup
from hydrajax.measure.one_step import SeenStep, likelihoods, seen_steps, shape_of
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import DynamicTree, TreeTopology, presets

PROMPT = [7, 3, 9, 3, 9, 30]
SMALL, LARGE = DynamicTree(6, 2, 3), DynamicTree(14, 2, 3)


@pytest.fixture(scope="module", params=["eagle", pytest.param("hydra++", marks=pytest.mark.slow)])
def executor(request, tiny_model):
    model, base = tiny_model
    config = model.config
    drafter = Eagle.for_base(config, jnp.float32)
    if request.param == "hydra++":
        drafter = HydraHeads(3, config.width, config.vocab_size).with_prefix(config)
    shapes = jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), base)
    return FusedExecutor(model, Params(base, noise(shapes, 1)), DecodeSpec(drafter, SMALL))


@pytest.fixture(scope="module")
def steps(executor) -> dict:
    """The first nine steps with each tree."""
    return {tree: list(seen_steps(executor.with_spec(tree=tree), PROMPT, most=9)) for tree in (SMALL, LARGE)}


def test_a_tree_of_any_parents_and_where_its_nodes_stood():
    """Node 3 hangs from node 1 and comes before the child of node 2, whose own child comes before both by its ranks."""
    tree, order = shape_of(np.array([-1, 0, 0, 2, 1, 1, 3]))
    assert tree.choices == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0))
    assert order.tolist() == [0, 1, 2, 4, 5, 3, 6]


def test_the_paths_that_were_grown_are_the_likeliest(executor, steps):
    """What is counted anew says what the growing said: of the same guesses the smaller tree holds the likeliest, no
    child is likelier than its parent, and siblings stand in the order of their probabilities.
    """
    (small, _), (large, tree) = ((likelihoods(executor, found[0]), found[0].tree) for found in steps.values())
    assert small[0] == large[0] == 1
    np.testing.assert_allclose(sorted(small[1:])[::-1], sorted(large[1:])[: -len(small) : -1], rtol=1e-4)
    assert (large[1:] <= large[tree.parents[1:]]).all()
    for children in tree.children:
        siblings = large[children[children > 0]]
        assert (np.diff(siblings) <= 0).all()
        assert siblings.sum() <= 1


def test_all_tokens_are_certain_together(executor):
    """Of a tree as wide as the vocabulary, which need not have been proposed; -1 is no token and is never said."""
    size = executor.model.config.vocab_size
    tree = TreeTopology([[rank] for rank in range(size + 1)])
    tokens = np.array([5, *range(size), -1])
    found = likelihoods(executor, SeenStep(1, tuple(PROMPT), tree, tokens, (0,), 3))
    assert found[1:].sum() == pytest.approx(1, abs=1e-5)
    assert found[-1] == 0


@pytest.fixture(scope="module")
def wanted(tiny_model) -> list[int]:
    """What the base writes alone."""
    model, base = tiny_model
    found = make_autoregressive_fn(model, max_new_tokens=40)(Params(base, {}), np.array([PROMPT], np.int32))
    return [*PROMPT, *found.ids()[0]]


def test_the_steps_write_what_decoding_writes(steps, wanted):
    for tree, found in steps.items():
        assert [step.number for step in found] == list(range(1, 10))
        last = found[-1]
        text = [*last.before, *(last.tokens[node] for node in last.path), last.bonus_token]
        assert text == wanted[: len(text)]
        for step, later in itertools.pairwise(found):
            assert step.tree.size == tree.size
            assert step.bonus_token == later.tokens[0]
            assert [step.tree.parents[node] for node in step.path] == [-1, *step.path[:-1]]
    assert len({step.tree for step in found}) > 1  # another one at another step


@pytest.mark.slow
def test_candidates_without_the_window_beside_them(tiny_model, wanted):
    """Which candidate goes along another's nodes is told as the tree; the window's nodes are no part of it."""
    model, base = tiny_model
    spec = DecodeSpec(Lookahead(4, 3, 3), presets.cartesian([3, 1]))
    steps = list(seen_steps(FusedExecutor(model, Params(base, {}), spec), PROMPT, most=12))
    last = steps[-1]
    text = [*last.before, *(last.tokens[node] for node in last.path), last.bonus_token]
    assert text == wanted[: len(text)]
    assert max(len(step.path) for step in steps) > 1
    for step in steps:
        assert len(step.tokens) == step.tree.size == 7
        assert [step.tree.parents[node] for node in step.path] == [-1, *step.path[:-1]]


@pytest.mark.slow
def test_a_branch_beside_the_tree_is_part_of_it(tiny_model):
    """By a rule that every token passes, so that the longest path is taken, which is the branch's where it has one."""
    model, base = tiny_model
    heads = HydraHeads(3, model.config.width, model.config.vocab_size)
    params = noise(jax.eval_shape(lambda base: heads.init(jax.random.key(0), BoundBase(model, base)), base), 1)
    spec = DecodeSpec(WithLookup(heads, 4), presets.cartesian([3, 1]), Typical(epsilon=0.0))
    steps = list(seen_steps(FusedExecutor(model, Params(base, params), spec), PROMPT, most=12))
    assert max(len(step.path) for step in steps) > 3  # deeper than the tree
    for step, later in itertools.pairwise(steps):
        assert later.before == (*step.before, *(step.tokens[node] for node in step.path))
        assert step.bonus_token == later.tokens[0]
    for step in steps:
        assert len(step.tokens) == step.tree.size == 7 + 4
        assert [step.tree.parents[node] for node in step.path] == [-1, *step.path[:-1]]


def test_where_the_text_ends(tiny_model):
    """At the end of the context; and what was looked up has no probabilities."""
    model, base = tiny_model
    executor = FusedExecutor(model, Params(base, {}), DecodeSpec(PromptLookup(), presets.chain(3)))
    steps = list(seen_steps(executor, PROMPT, most=100))
    assert len(steps[-1].before) + len(steps[-1].path) == model.config.max_positions
    assert steps[-1].bonus_token is None
    assert all(step.bonus_token is not None for step in steps[:-1])
    assert likelihoods(executor, steps[0]) is None
