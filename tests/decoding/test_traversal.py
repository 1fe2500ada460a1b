"""Rules that judge sampled trees, by enumeration of all draws and decisions, and against a recursion in NumPy."""

import itertools

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
from hydrajax.drafters.drafter import Proposal
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

VOCAB = 3
TREES = {
    "chain": presets.chain(3),
    "pairs": presets.cartesian([2, 2]),
    "odd": TreeTopology.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0]]),
}
RULES = {"rejection": RejectionSampling, "traversal": TraversalVerification, "block": BlockVerification}


class Tables:
    """Random distributions p and q of the token after a text, in NumPy; some tokens have no probability under p."""

    def __init__(self, seed: int, vocab: int = VOCAB):
        self.seed, self.vocab, self.known = seed, vocab, {}

    def __call__(self, text) -> tuple[np.ndarray, np.ndarray]:
        text = tuple(map(int, text))
        if text not in self.known:
            random = np.random.default_rng([self.seed, *text])
            p, q = random.dirichlet(np.full(self.vocab, 0.7), size=2)
            if random.random() < 0.3:
                p[random.integers(self.vocab)] = 0
            self.known[text] = p / p.sum(), q
        return self.known[text]


def without(q: np.ndarray, tokens) -> np.ndarray:
    """Return q after the draw of these tokens; zeros if nothing is left."""
    q = q.copy()
    q[list(tokens)] = 0
    return q / max(q.sum(), 1e-300)


def draws(tree: TreeTopology, tables: Tables):
    """Return the tokens of every possible draw of a tree below the root's token 0 ``[draws, N]``, and their
    probabilities.
    """
    found = [((0,), 1.0)]
    for node in range(1, tree.size):
        path = tree.node_paths[tree.parents[node]][: tree.depths[node]]
        earlier = [other for other in range(1, node) if tree.parents[other] == tree.parents[node]]
        found = [
            ((*tokens, token), probability * q[token])
            for tokens, probability in found
            for q in [without(tables([tokens[n] for n in path])[1], [tokens[n] for n in earlier])]
            for token in range(tables.vocab)
            if q[token] > 0
        ]
    return np.array([tokens for tokens, _ in found]), np.array([probability for _, probability in found])


def verdicts(children, texts, tables, accept, commits=lambda node, last: False, fault=""):
    """Judge one tree as Weng et al. (2025) do, with p, q and the acceptance probability alpha apart.

    Args:
        children: The children of each node, in the order of their draws.
        texts: The tokens from the root to each node.
        tables: Return p and q after a text.
        accept: Returns the probability with which a node is accepted, from the node and alpha. Alpha itself enumerates
            all decisions; 0 or 1 makes one.
        commits: Returns whether a node is accepted or rejected before the nodes below it.
        fault: An error to make.

    Returns:
        A list of the probability of ending at a node, the node, and the distribution of the bonus token.
    """
    found = []

    def judge(node, alpha, chance):
        """Append the verdicts at this node and below it; return the probability that all of them are rejected."""
        p, q = tables(texts[node])
        for child in children[node]:
            token = texts[child][-1]
            value = p[token] if fault == "a token alone" else alpha * p[token]
            worth = min(1, value / q[token])
            if commits(child, child == children[node][-1]):
                chosen = accept(child, worth)
                assert judge(child, 1.0, chance * chosen) < 1e-12
                chance *= 1 - chosen
            else:
                chance = judge(child, worth, chance)
            rest = np.maximum(alpha * p - q, 0)
            total, failed = rest.sum(), rest.sum() + (1 - alpha)  # the probability of a rejection
            if failed > 1e-12:
                alpha = total if fault == "alpha not normalised" else total / failed
                p = rest / total if total > 1e-12 else p
            q = q if fault == "a sibling twice" else without(q, [token])
        found.append((chance * accept(node, alpha), node, tables(texts[node])[0] if fault == "p again" else p))
        return chance * (1 - accept(node, alpha))

    judge(0, 1.0, 1.0)
    return found


def continued(text, length: int, tables: Tables):
    """Yield every text of this length that begins with ``text`` after the root, and its probability under p."""
    if len(text) == length + 1:
        yield text[1:], 1.0
        return
    for token, probability in enumerate(tables(text)[0]):
        for whole, rest in continued((*text, token), length, tables):
            yield whole, probability * rest


def children_of(tree: TreeTopology) -> list[list[int]]:
    return [[child for child in row if child > 0] for row in tree.children.tolist()]


def texts_of(tree: TreeTopology, tokens) -> list[tuple[int, ...]]:
    paths = zip(tree.node_paths, tree.depths, strict=True)
    return [tuple(int(tokens[node]) for node in path[: depth + 1]) for path, depth in paths]


def enumerated(tree: TreeTopology, tables: Tables, **settings) -> tuple[float, float]:
    """Return the largest error of the probability of an output, over all draws and decisions, and the expected number
    of accepted tokens.
    """
    length, accepted = tree.depth + 1, 0.0
    outputs = np.zeros([tables.vocab] * length)
    for tokens, probability in zip(*draws(tree, tables), strict=True):
        texts = texts_of(tree, tokens)
        for chance, node, bonus in verdicts(children_of(tree), texts, tables, lambda _, alpha: alpha, **settings):
            accepted += probability * chance * (len(texts[node]) - 1)
            for token in range(tables.vocab):
                for whole, rest in continued((*texts[node], token), length, tables):
                    outputs[whole] += probability * chance * bonus[token] * rest
    wanted = np.zeros_like(outputs)
    for whole, probability in continued((0,), length, tables):
        wanted[whole] = probability
    return float(np.abs(outputs - wanted).max()), float(accepted)


def always(node, last):
    return True


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("commits", [lambda node, last: False, always, lambda node, last: not last])
def test_the_algorithm_keeps_the_bases_distribution(name, commits):
    """Rejection sampling is the case in which every node is judged before those below it."""
    for seed in range(3):
        assert enumerated(TREES[name], Tables(seed), commits=commits)[0] < 1e-9


@pytest.mark.parametrize("fault", ["alpha not normalised", "p again", "a sibling twice", "a token alone"])
def test_the_enumeration_finds_errors(fault):
    assert enumerated(TREES["pairs"], Tables(0), fault=fault)[0] > 1e-3


COPIES = 16


@pytest.mark.parametrize(
    ("rule", "name"),
    [("block", "chain"), *itertools.product(("traversal", "rejection"), TREES)],
)
def test_the_rule_decides_as_the_algorithm(rule, name):
    """The same node and bonus token from the same random numbers, for every draw."""
    tree, tables = TREES[name], Tables(1)
    tokens = draws(tree, tables)[0].repeat(COPIES, axis=0)
    batch, inner = len(tokens), np.unique(tree.parents[1:])
    texts = [texts_of(tree, row) for row in tokens]
    p = np.array([[tables(text)[0] for text in row] for row in texts])
    q = np.array([[tables(row[node])[1] for node in inner] for row in texts])
    keys = position_keys(row_keys(jax.random.key(5), batch), np.zeros((batch, 1), int) + np.arange(tree.depth + 1))
    kind = per_row(RULES[rule](), batch)

    @quick_jit
    def judged(tokens, p, q, keys):
        proposal = Proposal(tokens, tree.topology, jnp.log(q))
        return kind.accept(VerifyResult(jnp.log(p), proposal), keys)

    accepted = judged(*(jnp.asarray(x, jnp.float32 if x.ndim == 3 else jnp.int32) for x in (tokens, p, q)), keys)
    if rule == "rejection":  # one number for each place among the siblings at each depth
        most = tree.children.shape[1]
        numbers = np.stack([jax.vmap(jax.vmap(jax.random.uniform))(fold(keys, CHILDREN + n)) for n in range(most)], -1)
        place = [(tree.depths[n] - 1, tree.children[tree.parents[n]].tolist().index(n)) for n in range(1, tree.size)]
        uniform = np.stack([np.zeros(batch), *(numbers[:, depth, rank] for depth, rank in place)], axis=1)
    else:
        uniform = np.array(jax.vmap(lambda key: jax.random.uniform(key, (tree.size,)))(fold(keys[:, 0], CHILDREN)))
    ends, bonus = [], []
    for row, numbers in zip(texts, uniform, strict=True):
        found = verdicts(
            children_of(tree), row, tables, lambda node, alpha, numbers=numbers: float(numbers[node] < alpha),
            **({"commits": always} if rule == "rejection" else {}),
        )  # fmt: skip
        [(node, distribution)] = [(node, bonus) for chance, node, bonus in found if chance]
        ends.append(node)
        bonus.append(distribution)
    np.testing.assert_array_equal(accepted.path[:, -1], ends)
    np.testing.assert_array_equal(accepted.accept_length, tree.depths[ends])
    at = keys[np.arange(batch), tree.depths[ends]] if rule == "rejection" else keys[:, 0]
    with np.errstate(divide="ignore"):
        wanted = sample(fold(at, BASE), jnp.log(jnp.asarray(np.array(bonus), jnp.float32)))
    np.testing.assert_array_equal(accepted.bonus_token, wanted)
    assert len(set(ends)) > tree.depth
