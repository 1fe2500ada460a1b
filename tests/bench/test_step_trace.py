"""Traced steps: their text is that of decoding, and path probabilities are those of the draft."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.noise import noise
from hydrajax import Params, Program, Typical
from hydrajax.api import make_autoregressive_fn
from hydrajax.bench.step_trace import TracedStep, path_probabilities, trace_steps, tree_of
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.several import Several, with_lookup
from hydrajax.lookahead.drafter import Lookahead
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
    return FusedExecutor(model, Params(base, noise(shapes, 1)), Program(drafter, SMALL))


@pytest.fixture(scope="module")
def steps(executor) -> dict:
    """The first nine steps with each tree."""
    return {tree: list(trace_steps(executor.with_program(tree=tree), PROMPT, most=9)) for tree in (SMALL, LARGE)}


def test_a_tree_of_any_parents_and_its_node_order():
    """Node 3 is a child of node 1 and precedes the child of node 2, whose own child precedes both by its ranks."""
    tree, order = tree_of(np.array([-1, 0, 0, 2, 1, 1, 3]))
    assert tree.choices == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0))
    assert order.tolist() == [0, 1, 2, 4, 5, 3, 6]


def test_dynamic_trees_have_the_most_likely_paths(executor, steps):
    """Recomputed probabilities agree with the drafter: the smaller tree has the most likely paths, no child is more
    likely than its parent, and siblings are sorted by probability.
    """
    (small, _), (large, tree) = ((path_probabilities(executor, found[0]), found[0].tree) for found in steps.values())
    assert small[0] == large[0] == 1
    np.testing.assert_allclose(sorted(small[1:])[::-1], sorted(large[1:])[: -len(small) : -1], rtol=1e-4)
    assert (large[1:] <= large[tree.parents[1:]]).all()
    for children in tree.children:
        siblings = large[children[children > 0]]
        assert (np.diff(siblings) <= 0).all()
        assert siblings.sum() <= 1


def test_probabilities_of_all_tokens_sum_to_one(executor):
    """For a tree as wide as the vocabulary, which need not have been proposed; -1 is no token and has probability 0."""
    size = executor.model.config.vocab_size
    tree = TreeTopology([[rank] for rank in range(size + 1)])
    tokens = np.array([5, *range(size), -1])
    found = path_probabilities(executor, TracedStep(1, tuple(PROMPT), tree, tokens, (0,), 3))
    assert found[1:].sum() == pytest.approx(1, abs=1e-5)
    assert found[-1] == 0


@pytest.fixture(scope="module")
def wanted(tiny_model) -> list[int]:
    """The tokens of decoding without a draft."""
    model, base = tiny_model
    found = make_autoregressive_fn(model, max_new_tokens=40)(Params(base, {}), np.array([PROMPT], np.int32))
    return [*PROMPT, *found.ids()[0]]


def test_traced_steps_give_the_decoded_tokens(steps, wanted):
    for tree, found in steps.items():
        assert [step.number for step in found] == list(range(1, 10))
        last = found[-1]
        text = [*last.before, *(last.tokens[node] for node in last.path), last.bonus_token]
        assert text == wanted[: len(text)]
        assert_connected(found, tree.size)
    assert len({step.tree for step in found}) > 1  # another one at another step


def assert_connected(steps, size: int) -> None:
    """Each step's path begins at the root, and its bonus token is the next root."""
    for step, later in itertools.pairwise(steps):
        assert later.before == (*step.before, *(step.tokens[node] for node in step.path))
        assert step.bonus_token == later.tokens[0]
    for step in steps:
        assert len(step.tokens) == step.tree.size == size
        assert [step.tree.parents[node] for node in step.path] == [-1, *step.path[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lookahead", "lookup branch", "chains"])
def test_other_drafters(tiny_model, wanted, kind):
    """Candidates of lookahead that share a prefix share nodes, and its window is left out. A lookup branch is in the
    tree: with a rule that accepts every token, it is the longest path. Chains replace nodes of a static tree.
    """
    model, base = tiny_model
    heads = HydraHeads(3, model.config.width, model.config.vocab_size)
    params = noise(jax.eval_shape(lambda base: heads.init(jax.random.key(0), BoundBase(model, base)), base), 1)
    rule = Typical if kind == "lookup branch" else Greedy
    drafter, params, size = {
        "lookahead": (Lookahead(4, 3, 3), {}, 7),
        "lookup branch": (with_lookup(heads, 4), params, 7 + 4),
        "chains": (Several(heads, (PromptLookup(),), 0), params, 7),
    }[kind]
    program = Program(drafter, presets.cartesian([3, 1]), rule)
    request = program.request(rule=Typical(epsilon=0.0)) if rule is Typical else program.request()
    steps = list(trace_steps(FusedExecutor(model, Params(base, params), program, request), PROMPT, most=12))
    assert_connected(steps, size)
    if rule is Typical:
        assert max(len(step.path) for step in steps) > 3  # deeper than the tree
    else:
        last = steps[-1]
        text = [*last.before, *(last.tokens[node] for node in last.path), last.bonus_token]
        assert text == wanted[: len(text)]
    if kind == "lookahead":
        assert max(len(step.path) for step in steps) > 1
    if kind == "chains":
        assert len({step.tree for step in steps}) > 1


def test_the_end_of_the_context(tiny_model):
    """Tracing stops there; lookup candidates have no probabilities."""
    model, base = tiny_model
    executor = FusedExecutor(model, Params(base, {}), Program(PromptLookup(), presets.chain(3)))
    steps = list(trace_steps(executor, PROMPT, most=100))
    assert len(steps[-1].before) + len(steps[-1].path) == model.config.max_positions
    assert steps[-1].bonus_token is None
    assert all(step.bonus_token is not None for step in steps[:-1])
    assert path_probabilities(executor, steps[0]) is None
