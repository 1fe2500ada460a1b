"""Rules that judge sampled trees: all draws and decisions of a recursion in NumPy are enumerated, and the rules decide
as the recursion does.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import per_row
from helpers.lab import quick_jit
from hydrajax.decoding.acceptance import VerifyResult
from hydrajax.decoding.random_keys import position_keys, row_keys
from hydrajax.decoding.rejection import BASE, CHILDREN, RejectionSampling, fold
from hydrajax.decoding.sampling import sample
from hydrajax.decoding.traversal import BlockVerification, TraversalVerification
from hydrajax.drafters import growing
from hydrajax.drafters.branch import with_branch
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw, Proposal
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

VOCAB = 3
STATIC = {
    "chain": presets.chain(3),
    "pairs": presets.cartesian([2, 2]),
    "odd": TreeTopology.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0]]),
}
GROWN, BRANCH = DynamicTree(7, 2, 2), (1, 0, 2, 2, 1)
BRANCHED = "pairs, branch", "grown, branch"  # with a branch of given nodes
RULES = {"rejection": RejectionSampling, "traversal": TraversalVerification, "block": BlockVerification}


class Tables:
    """Random distributions p and q of the token after a text, by its last token and length; p is 0 at some tokens."""

    def __init__(self, seed: int):
        random = np.random.default_rng(seed)
        self.p, self.q = random.dirichlet(np.full(VOCAB, 0.7), size=(2, 9, VOCAB))
        self.p[np.arange(9), :, random.integers(VOCAB, size=9)] *= random.random((9, 1)) < 0.5
        self.p /= self.p.sum(axis=-1, keepdims=True)

    def __call__(self, text) -> tuple[np.ndarray, np.ndarray]:
        return self.p[len(text) - 1, text[-1]], self.q[len(text) - 1, text[-1]]


class Tree(NamedTuple):
    """One filled tree: the probability of its draws; of each node the children in order, its text from the root, and
    whether it was given.
    """

    probability: float
    children: list[list[int]]
    texts: list[tuple[int, ...]]
    given: np.ndarray


def without(q: np.ndarray, tokens) -> np.ndarray:
    """Return q after the draw of these tokens; zeros if nothing is left."""
    q = q.copy()
    q[list(tokens)] = 0
    return q / max(q.sum(), 1e-300)


def filled(tree: TreeTopology, tables: Tables) -> tuple[Proposal, np.ndarray]:
    """Return every draw of a static tree below the root's token 0, one per sequence, and its probability."""
    found = [((0,), 1.0)]
    for node in range(1, tree.size):
        path = tree.node_paths[tree.parents[node]][: tree.depths[node]]
        earlier = [other for other in range(1, node) if tree.parents[other] == tree.parents[node]]
        found = [
            ((*tokens, token), probability * q[token])
            for tokens, probability in found
            for q in [without(tables([tokens[n] for n in path])[1], [tokens[n] for n in earlier])]
            for token in np.flatnonzero(q)
        ]
    tokens = np.array([tokens for tokens, _ in found], np.int32)
    paths = [tree.node_paths[node][: tree.depths[node] + 1] for node in tree.topology.inner]
    q = np.array([[tables(row[path])[1] for path in paths] for row in tokens], np.float32)
    return Proposal(tokens, tree.topology, np.log(q)), np.array([probability for _, probability in found])


def grown(tables: Tables, monkeypatch) -> tuple[Proposal, np.ndarray]:
    """Return every draw of a dynamic tree, one per sequence, and its probability: `growing.grow` with given draws."""
    orders = np.array([(a, b) for a in range(VOCAB) for b in range(VOCAB) if a != b])
    levels = np.split(np.stack(np.meshgrid(*[np.arange(6)] * 5), -1).reshape(-1, 5), [1, 3], axis=1)
    batch, probabilities = len(levels[0]), []

    def drawn(lm_head, keys, logits, k):
        tokens = jnp.asarray(orders[levels[len(probabilities)]])
        first, second = jnp.moveaxis(jnp.take_along_axis(jax.nn.softmax(logits), tokens, axis=-1), -1, 0)
        probabilities.append(jnp.prod(first * second / (1 - first), axis=1))
        return tokens, jnp.log(jnp.stack([first, second], axis=-1))

    def guess(carry, beam):
        return carry, jnp.log(jnp.asarray(tables.q[beam.depth], jnp.float32))[beam.tokens]

    @quick_jit
    def grow(root):
        draw = Draw(row_keys(jax.random.key(0), batch)[:, None], jnp.ones(batch))
        return growing.grow(GROWN, root, guess, None, LmHead(), VOCAB, draw)[0], jnp.prod(jnp.stack(probabilities), 0)

    monkeypatch.setattr(LmHead, "drawn", drawn)
    proposal, probability = jax.device_get(grow(jnp.zeros(batch, jnp.int32)))
    # Draws that are in no node make no difference.
    same = np.concatenate([proposal.tokens, proposal.tree.parents], axis=1)
    _, first, index = np.unique(same, axis=0, return_index=True, return_inverse=True)
    return jax.tree.map(lambda x: x[first], proposal), np.bincount(index.ravel(), probability)


def proposals(name: str, tables: Tables, monkeypatch) -> tuple[Proposal, list[Tree]]:
    """Return every draw of a tree, as one proposal and as trees."""
    shape, _, branch = name.partition(", ")
    proposal, probabilities = grown(tables, monkeypatch) if shape == "grown" else filled(STATIC[shape], tables)
    if branch:
        proposal = with_branch(proposal, jnp.asarray([BRANCH] * len(proposal.tokens), jnp.int32), 2)
    of_rows = [
        np.broadcast_to(x, (len(probabilities), *np.shape(x)[-axes:]))
        for x, axes in (
            (getattr(proposal.tree, name), 1 + (name in ("children", "paths")))
            for name in ("children", "paths", "depths", "parent_slot")
        )
    ]
    trees = [
        Tree(
            float(probability),
            [[child for child in row if child > 0] for row in children.tolist()],
            [tuple(tokens[path[: depth + 1]].tolist()) for path, depth in zip(paths, depths, strict=True)],
            slots >= proposal.log_q.shape[1],
        )
        for probability, tokens, children, paths, depths, slots in zip(
            probabilities, np.asarray(proposal.tokens), *of_rows, strict=True
        )
    ]
    return proposal, trees


def verdicts(tree: Tree, tables: Tables, accept, from_root=False, fault=""):
    """Judge a tree as Weng et al. (2025) do, with p, q and alpha apart.

    Args:
        tree: The tree.
        tables: Return p and q after a text.
        accept: Returns the probability of accepting a node, from the node and alpha. Alpha itself enumerates all
            decisions; 0 or 1 makes one.
        from_root: Accept or reject each node before the nodes below it, which is rejection sampling.
        fault: An error to make.

    Returns:
        A list of the probability of ending at a node, the node, and the distribution of the bonus token.
    """
    found = []

    def judge(node, alpha, chance):
        """Append the verdicts at this node and below it; return the probability that all of them are rejected."""
        p, q = tables(tree.texts[node])
        for child in tree.children[node]:
            token = tree.texts[child][-1]
            drawn_from = np.eye(VOCAB)[token] if tree.given[child] else q
            below = min(1, (p if fault == "a token alone" else alpha * p)[token] / drawn_from[token])
            if from_root:
                chosen = accept(child, below)
                judge(child, 1.0, chance * chosen)
                chance *= 1 - chosen
            else:
                chance = judge(child, below, chance)
            rest = np.maximum(alpha * p - drawn_from, 0)
            total, rejection = rest.sum(), rest.sum() + (1 - alpha)
            if rejection > 1e-12:
                alpha = total if fault == "alpha not normalised" else total / rejection
                p = rest / total if total > 1e-12 else p
            q = q if fault == "a sibling twice" else without(q, [token])
        chosen = accept(node, alpha)
        found.append((chance * chosen, node, tables(tree.texts[node])[0] if fault == "p again" else p))
        return chance * (1 - chosen)

    judge(0, 1.0, 1.0)
    return found


def enumerated(trees: list[Tree], tables: Tables, **settings) -> tuple[float, float]:
    """Return the largest error of the probability of a text, and the expected number of accepted tokens.

    The accepted tokens and the bonus token are continued by p to texts of one length.
    """
    length, accepted = max(len(text) for tree in trees for text in tree.texts) + 1, 0.0

    @functools.cache
    def continued(count, token):
        """Return the probabilities of all texts after ``count`` tokens, the last of which is ``token``."""
        if count == length:
            return np.ones(())
        shares = enumerate(tables.p[count - 1, token])
        return np.stack([share * continued(count + 1, following) for following, share in shares])

    found = np.zeros([VOCAB] * (length - 1))
    for tree in trees:
        for chance, node, bonus in verdicts(tree, tables, lambda _, alpha: alpha, **settings):
            text, probability = tree.texts[node], tree.probability * chance
            accepted += probability * (len(text) - 1)
            for token in range(VOCAB):
                found[(*text[1:], token)] += probability * bonus[token] * continued(len(text) + 1, token)
    return float(np.abs(found - continued(1, 0)).max()), float(accepted)


@pytest.mark.parametrize(
    "name", ["chain", "pairs", "grown", *(pytest.param(name, marks=pytest.mark.slow) for name in ("odd", *BRANCHED))]
)
def test_both_algorithms_keep_the_bases_distribution(name, monkeypatch):
    """From the leaves up, and from the root down."""
    tables = Tables(0)
    trees = proposals(name, tables, monkeypatch)[1]
    assert sum(tree.probability for tree in trees) == pytest.approx(1, abs=1e-5)
    assert (len({str(tree.children) for tree in trees}) > 4) == (name not in STATIC)
    assert max(enumerated(trees, tables, from_root=first)[0] for first in (False, True)) < 1e-6


FAULTS = ["alpha not normalised", "p again", "a sibling twice", "a token alone"]


@pytest.mark.parametrize(("name", "fault"), [*(("pairs", fault) for fault in FAULTS), ("grown", "by tokens")])
def test_the_enumeration_finds_errors(name, fault, monkeypatch):
    """Also nodes chosen by their tokens."""
    if fault == "by tokens":
        monkeypatch.setattr(growing, "_prospects", lambda log_p: (log_p, jnp.zeros_like(log_p)))
    tables = Tables(1)
    assert enumerated(proposals(name, tables, monkeypatch)[1], tables, fault=fault)[0] > 1e-3


def test_on_chains_it_is_block_verification_and_accepts_at_least_as_much_as_rejection(monkeypatch):
    gains = []
    for seed in range(10):
        tables = Tables(seed)
        trees = proposals("chain", tables, monkeypatch)[1]
        for tree in trees:
            found = [chance for chance, _, _ in verdicts(tree, tables, lambda _, alpha: alpha)]
            np.testing.assert_allclose(found[::-1], of_block_verification(tree.texts[-1], tables), atol=1e-12)
        gains.append(enumerated(trees, tables)[1] - enumerated(trees, tables, from_root=True)[1])
    assert min(gains) > -1e-12
    assert max(gains) > 0.1


def of_block_verification(text, tables) -> np.ndarray:
    """Return the probabilities of accepting 0, 1 ... K tokens of a chain, by algorithm 2 of Sun et al. (2024)."""
    share, ends = 1.0, np.zeros(len(text))
    for count in range(len(text)):
        if count:
            p, q = tables(text[:count])
            share = min(1, share * p[text[count]] / q[text[count]])
        p, q = tables(text[: count + 1])
        rest = np.maximum(share * p - q, 0).sum()
        last = count == len(text) - 1
        stops = share if last else 1.0 if count == 0 else rest / (rest + 1 - share)
        ends[:count] *= 1 - stops
        ends[count] = stops
    return ends


COPIES = 12


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *(("block", "chain"), ("traversal", "odd"), ("traversal", "grown, branch"), ("rejection", "odd")),
        *(pytest.param("traversal", name, marks=pytest.mark.slow) for name in ("chain", "pairs", "grown", BRANCHED[0])),
        *(pytest.param("rejection", name, marks=pytest.mark.slow) for name in ("chain", "pairs", "grown", *BRANCHED)),
    ],
)
def test_the_rule_decides_as_the_algorithm(rule, name, monkeypatch):
    """The same node and bonus token from the same random numbers, for every draw."""
    tables, kind = Tables(1), RULES[rule]
    proposal, trees = proposals(name, tables, monkeypatch)
    trees = [tree for tree in trees for _ in range(COPIES)]
    batch, n_nodes, depth = len(trees), proposal.tree.size, proposal.tree.depth
    proposal = jax.tree.map(lambda x: np.repeat(x, COPIES, 0) if len(x) == batch // COPIES else x, proposal)
    p = jnp.asarray([[tables(text)[0] for text in tree.texts] for tree in trees], jnp.float32)
    keys = position_keys(row_keys(jax.random.key(5), batch), np.zeros((batch, 1), int) + np.arange(depth + 1))
    static = None if proposal.tree.of_each_row else proposal.tree

    @quick_jit
    def judged(p, proposal, keys):
        proposal = proposal if static is None else proposal._replace(tree=static)
        return per_row(kind(), batch).accept(VerifyResult(jnp.log(p), proposal), keys)

    accepted = judged(p, proposal, keys)
    uniform = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (n_nodes,)))(fold(keys[:, 0], CHILDREN)))
    if rule == "rejection":  # one number for each place among the siblings at each depth
        ranks = range(proposal.tree.children.shape[-1])
        of_places = np.stack([jax.vmap(jax.vmap(jax.random.uniform))(fold(keys, CHILDREN + n)) for n in ranks], -1)
    ends, bonus = [], []
    for row, tree in enumerate(trees):
        numbers = uniform[row].copy()
        if rule == "rejection":
            numbers[0] = 0
            for node, children in enumerate(tree.children):
                numbers[children] = of_places[row, len(tree.texts[node]) - 1, : len(children)]
        found = verdicts(tree, tables, lambda node, alpha, u=numbers: float(u[node] < alpha), rule == "rejection")
        [(node, distribution)] = [(node, bonus) for chance, node, bonus in found if chance]
        ends.append(node)
        bonus.append(distribution)
    lengths = np.array([len(tree.texts[node]) - 1 for tree, node in zip(trees, ends, strict=True)])
    np.testing.assert_array_equal(accepted.path[:, -1], ends)
    np.testing.assert_array_equal(accepted.accept_length, lengths)
    at = keys[np.arange(batch), lengths] if rule == "rejection" else keys[:, 0]
    wanted = sample(fold(at, BASE), jnp.log(jnp.asarray(np.array(bonus), jnp.float32)))
    np.testing.assert_array_equal(accepted.bonus_token, wanted)
    assert len(set(ends)) > 2


def test_block_verification_refuses_other_trees():
    for tree, found in (
        (presets.cartesian([2]), "2 siblings, expected chain-K"),
        (GROWN, "dynamic-7-2-2, expected a static tree"),
    ):
        with pytest.raises(HydrajaxError) as caught:
            BlockVerification().check(tree)
        assert str(caught.value) == f"tree: got {found} for BlockVerification, which judges chains alone"
    BlockVerification().check(presets.root())
