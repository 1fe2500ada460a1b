"""Random trees built on the device, a new one for every sequence and step, with every rule."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import how, per_row
from helpers.lab import CONTEXT, NEW, VOCAB, Scripted, quick_jit
from helpers.tree_tools import typical_walk
from hydrajax.api import make_decode_fn
from hydrajax.decoding.acceptance import Greedy, VerifyResult
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.drafter import Proposal
from hydrajax.trees.built_trees import from_parents
from hydrajax.trees.static_tree import TreeTopology

N_NODES, DEPTH = 12, 4
# Only size and depth are used.
ROOM = TreeTopology.from_choices([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]] + [[rank] for rank in range(1, N_NODES - 4)])
PROMPTS = [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]


def grow(seeds, observed):
    """Return ``(parents, target)``, int32 ``[B, N]`` and ``[B]``: a tree per sequence and a node of it.

    About one node in five has no parent; the target and its ancestors have one.
    """
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(seeds, observed)
    noise = jax.vmap(lambda key: jax.random.uniform(key, (N_NODES, N_NODES + 1)))(keys)
    batch = len(seeds)
    parents, depths = [jnp.full(batch, -1)], [jnp.zeros(batch, int)]
    for node in range(1, N_NODES):
        above = jnp.stack(depths, axis=1)
        chosen = jnp.argmax(jnp.where((above >= 0) & (above < DEPTH), noise[:, node, :node], -1), axis=1)
        alone = noise[:, node, -1] < 0.2
        depth = jnp.take_along_axis(above, chosen[:, None], axis=1)[:, 0] + 1
        parents.append(jnp.where(alone, -1, chosen))
        depths.append(jnp.where(alone, -9, depth))  # nodes without a parent have no children
    target = jnp.argmax(jnp.where(jnp.stack(depths, axis=1) >= 0, noise[:, 0, :N_NODES], -1), axis=1)
    return jnp.stack(parents, axis=1).astype(jnp.int32), target.astype(jnp.int32)


grown = quick_jit(grow)


@dataclass(frozen=True)
class Forest(Scripted):
    """Propose the reference text on the path to the target of a random tree, and wrong tokens elsewhere.

    Nodes without a parent get the token that follows the root, which a rule must not accept as a child of it.
    Parameters and state are those of `lab.Oracle`, with ``seeds`` in place of ``right`` and ``salt``.
    """

    depth: int = DEPTH

    def propose(self, params, state, root, tree, base, draw=None):
        parents, target = grow(params["seeds"], state)
        made = from_parents(parents, DEPTH, most_children=N_NODES - 1)
        places = state[:, None] + jnp.where(parents < 0, 1, made.depths)
        truth = jnp.take_along_axis(params["text"], places, axis=1)
        on_path = jnp.take_along_axis(made.mask, target[:, None, None], axis=1)[:, 0]
        wrong = (truth + 1 + np.arange(N_NODES) % (VOCAB - 1)) % VOCAB
        tokens = jnp.where(on_path | (parents < 0), truth, wrong).astype(jnp.int32)
        return Proposal(tokens.at[:, 0].set(root), made)


def expected_accept_lengths(seed: int, start: int, emitted: int) -> list[int]:
    """Return the target depth of each tree of a sequence, cut at the end of the text."""
    parents, targets = jax.device_get(grown(np.full(CONTEXT, seed), np.arange(CONTEXT)))
    at, steps = start, []
    while at < start + emitted:
        node, depth = targets[at], 0
        while parents[at, node] >= 0:
            node, depth = parents[at, node], depth + 1
        assert node == 0
        steps.append(min(depth, start + emitted - at - 1))
        at += steps[-1] + 1
    return steps


@pytest.fixture(scope="module")
def runs(lab):
    """Return ``run(rule, seed) -> (result with trees, result without)``; trees propose the text of the second."""
    compiled = {}

    def run(rule, seed):
        some = how(rule[0] if isinstance(rule, list) else rule)
        kind = jax.tree.structure(some.rule), some.processors != ()
        if kind not in compiled:
            compiled[kind] = make_decode_fn(lab.model, Forest(), ROOM, some.rule, max_new_tokens=NEW)
        alone = lab.plainly(PROMPTS, rule, seed)
        texts = np.zeros((len(PROMPTS), lab.context + DEPTH + 1), np.int32)
        for row, prompt in enumerate(PROMPTS):
            texts[row, : len(prompt)] = prompt
            texts[row, len(prompt) : len(prompt) + NEW] = alone.tokens[row]
        params = {"text": texts, "seeds": jnp.arange(len(PROMPTS)) + 10 * seed}
        return lab.decode(compiled[kind], 0, params, PROMPTS, rule=rule, seed=seed), alone

    return run


def processed(rule) -> list:
    """Return a request with different processors for each prompt."""
    numbers = [(1.4, 0.5, 0.3), (0.6, -0.4, 1.1), (1.1, 1.5, -0.2)]
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = [Penalties(**dict(zip(names, row, strict=True))) for row in numbers]
    return [how(rule, processors=[each, LogitBias({3: row - 1.0})]) for row, each in enumerate(penalties)]


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Greedy(), id="greedy"),
        pytest.param(ExactSampling(1.3), id="exact"),
        pytest.param(processed(ExactSampling(1.3, min_p=0.05)), id="exact with processors and min_p"),
    ],
)
@pytest.mark.quick("exact")
def test_random_trees_give_the_tokens_of_plain_decoding(lab, runs, rule):
    """Tokens are equal, and the number of steps shows that the trees are used."""
    for seed in range(3):
        trees, plain = runs(rule, seed)
        np.testing.assert_array_equal(trees.tokens, plain.tokens)
        for row, prompt in enumerate(PROMPTS):
            wanted = expected_accept_lengths(10 * seed + row, len(prompt), NEW)
            assert trees.accept_lengths[row, : trees.steps[row]].tolist() == wanted
        assert trees.tokens_per_step() > 2
        assert trees.accept_lengths.max() >= 3


def test_the_trees_differ_between_rows_and_steps():
    parents = np.asarray(grown(np.arange(CONTEXT) // 4, np.arange(CONTEXT) % 4)[0])
    assert len({tuple(row) for row in parents.tolist()}) == CONTEXT
    assert (parents[:, 1:] == -1).any()


def test_typical_acceptance_of_one_tree_per_sequence_matches_a_walk():
    rule, batch, vocab = Typical(0.3, temperature=0.8), CONTEXT, 5
    random = np.random.default_rng(0)
    parents = jax.device_get(grown(np.arange(batch), np.arange(batch) % 3))[0]
    logits = 1.5 * random.normal(size=(batch, N_NODES, vocab)).astype(np.float32)
    tokens = random.integers(-1, vocab, (batch, N_NODES), dtype=np.int32)

    @quick_jit
    def accept(rule, parents, logits, tokens):
        made = from_parents(parents, DEPTH, most_children=N_NODES - 1)
        return rule.accept(VerifyResult(logits, Proposal(tokens, made)), None)

    found = jax.device_get(accept(per_row(rule, batch), parents, logits, tokens))
    p = np.asarray(jax.nn.softmax(logits.astype(np.float64) / rule.temperature, axis=-1), np.float64)
    lengths = []
    for row in range(batch):
        nodes = typical_walk(rule, parents[row], p[row], tokens[row])
        assert found.path[row].tolist() == nodes + [nodes[-1]] * (DEPTH + 1 - len(nodes))
        assert found.accept_length[row] == len(nodes) - 1
        assert found.bonus_token[row] == logits[row, nodes[-1]].argmax()
        lengths.append(len(nodes) - 1)
    assert np.bincount(lengths, minlength=3)[:3].all()


def test_a_node_without_a_parent_is_never_accepted():
    """Every node has the best token; only descendants of the root are accepted."""
    parents = np.array([[-1, -1, 0, 1], [-1, 0, -1, 1]], np.int32)
    logits, tokens = jnp.zeros((2, 4, 5)).at[..., 3].set(9.0), jnp.full((2, 4), 3)
    proposal = Proposal(tokens, quick_jit(lambda parents: from_parents(parents, depth=2, most_children=2))(parents))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    for rule in (Greedy(), Typical(0.1, temperature=1.0), ExactSampling(0.1)):
        accepted = jax.device_get(
            quick_jit(lambda rule: rule.accept(VerifyResult(logits, proposal), keys))(per_row(rule, 2))
        )
        assert accepted.path.tolist() == [[0, 2, 2], [0, 1, 3]]
        assert accepted.accept_length.tolist() == [1, 2]
