"""Rules that judge sampled trees: all draws and decisions of a recursion in NumPy are enumerated, and the rules decide
as the recursion does.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.how import per_row
from helpers.lab import quick_jit
from helpers.refusals import refusal
from hydrajax.decoding.acceptance import VerifyResult
from hydrajax.decoding.random_keys import position_keys, row_keys
from hydrajax.decoding.rejection import BASE, CHILDREN, RejectionSampling, fold
from hydrajax.decoding.sampling import sample
from hydrajax.decoding.traversal import BlockVerification, TraversalVerification
from hydrajax.drafters import growing
from hydrajax.drafters.branch import with_branch
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw, Proposal
from hydrajax.drafters.filling import fill
from hydrajax.trees import presets
from hydrajax.trees.built_trees import NDIMS
from hydrajax.trees.dynamic import DynamicTree, guesses_of
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.topology import Topology, take

VOCAB, BRANCH, COPIES = 3, (1, 0, 2, 2, 1), 12
CHAIN, GROWN = presets.chain(3), DynamicTree(7, 2, 2)
EVEN = TreeTopology([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
ODD = TreeTopology([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
# With the number of given nodes, which are a branch.
CASES = {
    "chain": (CHAIN, 0),
    "odd": (ODD, 0),
    "grown": (GROWN, 0),
    "even, given": (EVEN, 2),
    "grown, given": (GROWN, 2),
}
GIVEN = list(CASES)[3:]


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
    """The probability of a tree's draws; of each node the children in order, the text from the root, and whether it was
    given.
    """

    probability: float
    children: list[list[int]]
    texts: list[tuple[int, ...]]
    given: np.ndarray


def drawn(tree, branch: int, tables: Tables) -> tuple[Proposal, list[Tree]]:
    """Return all different trees that `fill` makes of all draws below token 0, as one proposal and as `Tree`."""
    levels = guesses_of(tree)
    orders = [np.array(list(itertools.permutations(range(VOCAB), k))) for _, k in levels]
    n_orders = [len(found) for found, (n, _) in zip(orders, levels, strict=True) for _ in range(n)]
    index = np.stack(np.meshgrid(*map(np.arange, n_orders), indexing="ij"), -1).reshape(-1, len(n_orders))
    index = np.split(index, np.cumsum([n for n, _ in levels])[:-1], axis=1)
    batch, shares = len(index[0]), []

    def given_draws(lm_head, keys, logits, k):
        tokens = jnp.asarray(orders[len(shares)][index[len(shares)]])
        q = jnp.take_along_axis(jax.nn.softmax(logits), tokens, axis=-1)
        shares.append(jnp.prod(q / (1 - (jnp.cumsum(q, axis=-1) - q)), axis=(1, 2)))
        return tokens, jnp.log(q)

    def guess(carry, beam):
        return carry, jnp.log(jnp.asarray(tables.q[beam.depth], jnp.float32))[beam.tokens]

    @quick_jit
    def filled(root):
        draw = Draw(row_keys(jax.random.key(0), batch)[:, None].repeat(len(levels), 1), jnp.ones(batch))
        proposal, _ = fill(tree, root, guess, None, LmHead(), VOCAB, draw)
        if branch:
            proposal = with_branch(proposal, jnp.asarray([BRANCH] * batch, jnp.int32), branch)
        return proposal._replace(scratch=()), jnp.prod(jnp.stack(shares), axis=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LmHead, "drawn", given_draws)
        patch.setattr(LmHead, "sampled", lambda *arguments: given_draws(*arguments)[0])
        proposal, shares = jax.device_get(filled(jnp.zeros(batch, jnp.int32)))
    each = (np.broadcast_to(x, (batch, *x.shape[-axes:])) for x, axes in zip(proposal.tree, NDIMS, strict=True))
    proposal = proposal._replace(tree=Topology(*each))
    same = np.concatenate([proposal.tokens, proposal.tree.parents], axis=1)
    _, first, index = np.unique(same, axis=0, return_index=True, return_inverse=True)
    proposal, trees = jax.tree.map(lambda x: x[first], proposal), []
    for row, share in enumerate(np.bincount(index.ravel(), shares)):
        tree, tokens = Topology(*(x[row] for x in proposal.tree)), proposal.tokens[row]
        children = [[child for child in line if child > 0] for line in tree.children.tolist()]
        texts = [tuple(tokens[path[: depth + 1]].tolist()) for path, depth in zip(tree.paths, tree.depths, strict=True)]
        trees.append(Tree(share, children, texts, tree.parent_slot >= proposal.log_q.shape[1]))
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
            if fault != "a sibling twice":
                q = np.where(np.arange(VOCAB) == token, 0, q)
                q = q / max(q.sum(), 1e-300)
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


@pytest.mark.parametrize("name", ["chain", "odd", "grown", *(pytest.param(x, marks=pytest.mark.slow) for x in GIVEN)])
def test_rejection_and_traversal_keep_the_bases_distribution(name):
    _, trees = drawn(*CASES[name], tables := Tables(0))
    assert sum(tree.probability for tree in trees) == pytest.approx(1, abs=1e-5)
    assert (len({str(tree.children) for tree in trees}) > 4) == (name in ("grown", *GIVEN))
    assert max(enumerated(trees, tables, from_root=first)[0] for first in (False, True)) < 1e-6


@pytest.mark.parametrize("fault", ["alpha not normalised", "p again", "a sibling twice", "a token alone", "by tokens"])
def test_the_enumeration_finds_errors(fault, monkeypatch):
    """Also nodes of a dynamic tree that are chosen by their tokens."""
    if fault == "by tokens":
        monkeypatch.setattr(growing, "_prospects", lambda log_p: (log_p, jnp.zeros_like(log_p)))
    _, trees = drawn(GROWN if fault == "by tokens" else EVEN, 0, tables := Tables(1))
    assert enumerated(trees, tables, fault=fault)[0] > 1e-3


@pytest.mark.parametrize(
    ("tree", "seeds", "least"),
    [(CHAIN, 3, 1e-3), (EVEN, 1, 0.05), (TreeTopology([[0], [0, 0], [0, 1], [0, 1, 0]]), 4, -1)],
)
def test_more_tokens_are_accepted_than_by_rejection_unless_later_siblings_have_deeper_branches(tree, seeds, least):
    gains = []
    for tables in map(Tables, range(seeds)):
        _, trees = drawn(tree, 0, tables)
        gains.append(enumerated(trees, tables)[1] - enumerated(trees, tables, from_root=True)[1])
    assert min(gains) > least
    assert (min(gains) < -1e-4) == (least < 0)


def test_on_chains_it_is_block_verification():
    """Sun et al. (2024): accept as many tokens as the last accepted prefix has, each with a probability of its own."""
    _, trees = drawn(CHAIN, 0, tables := Tables(0))
    for tree in trees:
        text, share, wanted = tree.texts[-1], 1.0, np.ones(4)
        for count in range(4):
            if count:
                p, q = tables(text[:count])
                share = min(1, share * p[text[count]] / q[text[count]])
            p, q = tables(text[: count + 1])
            rest = np.maximum(share * p - q, 0).sum()
            accepted = {0: 1.0, 3: share}.get(count) or rest / (rest + 1 - share)
            wanted[:count] *= 1 - accepted
            wanted[count] = accepted
        found = [chance for chance, _, _ in verdicts(tree, tables, lambda _, alpha: alpha)]
        np.testing.assert_allclose(found[::-1], wanted, atol=1e-12)


DECISIONS = [(BlockVerification, "chain"), (TraversalVerification, "odd"), (TraversalVerification, "grown, given")]
MORE = [(kind, name) for kind in (TraversalVerification, RejectionSampling) for name in CASES]


@pytest.mark.parametrize(
    ("kind", "name"),
    [*DECISIONS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in DECISIONS)],
)
def test_the_rule_decides_as_the_algorithm(kind, name):
    """The same node and bonus token from the same random numbers, for every draw."""
    from_root, tables = kind is RejectionSampling, Tables(1)
    proposal, trees = drawn(*CASES[name], tables)
    proposal = jax.tree.map(lambda x: x.repeat(COPIES, axis=0), proposal)
    trees = [tree for tree in trees for _ in range(COPIES)]
    p = np.array([[tables(text)[0] for text in tree.texts] for tree in trees], np.float32)
    batch, size = proposal.tokens.shape
    above, place = np.zeros((2, batch, size), int)  # depth of each node's parent, and its place among the siblings
    for row, tree in enumerate(trees):
        for node, children in enumerate(tree.children):
            above[row, children], place[row, children] = len(tree.texts[node]) - 1, range(len(children))

    @quick_jit
    def judged(log_p, proposal):
        depths = jnp.tile(jnp.arange(proposal.tree.depth + 1), (batch, 1))
        keys = position_keys(row_keys(jax.random.key(5), batch), depths)
        accepted = per_row(kind(), batch).accept(VerifyResult(log_p, proposal), keys)
        if not from_root:
            uniform = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(fold(keys[:, 0], CHILDREN))
            return accepted, uniform, fold(keys[:, 0], BASE)
        own = jax.vmap(jax.vmap(jax.random.fold_in))(take(keys, above), CHILDREN + place)
        last = keys[jnp.arange(batch), accepted.accept_length]
        return accepted, jax.vmap(jax.vmap(jax.random.uniform))(own).at[:, 0].set(0), fold(last, BASE)

    with np.errstate(divide="ignore"):
        accepted, uniform, key = judged(np.log(p), proposal)
    ends, bonus = [], []
    for tree, numbers in zip(trees, np.asarray(uniform), strict=True):
        found = verdicts(tree, tables, lambda node, alpha, u=numbers: float(u[node] < alpha), from_root)
        [(node, distribution)] = [(node, bonus) for chance, node, bonus in found if chance]
        ends.append(node)
        bonus.append(distribution)
    np.testing.assert_array_equal(accepted.path[:, -1], ends)
    np.testing.assert_array_equal(accepted.accept_length, proposal.tree.depths[np.arange(batch), ends])
    np.testing.assert_array_equal(accepted.bonus_token, sample(key, jnp.log(np.array(bonus, np.float32))))
    assert len(set(ends)) > 2


def test_block_verification_refuses_other_trees():
    BlockVerification().check(presets.root())
    refusal(lambda: BlockVerification().check(ODD), "tree: got 3 siblings, expected chain-K for BlockVerification")
    refusal(lambda: BlockVerification().check(GROWN), "expected a static tree for BlockVerification")
