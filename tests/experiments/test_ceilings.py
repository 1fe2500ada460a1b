"""The bound on accepted tokens, against enumerated draws and the optimum of a linear program on toy vocabularies."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from ceilings import accepted_shares, draw_chances, expected_steps, in_tree
from scipy.optimize import linprog

from hydrajax.trees import TreeTopology

V = 3
TREES = {"siblings": [(0,), (1,)], "chain": [(0,), (0, 0)], "both": [(0,), (1,), (0, 0)]}


def draws(q: np.ndarray, k: int):
    """Yield all k draws without replacement, in order, and their probabilities."""
    for tokens in itertools.permutations(range(len(q)), k):
        left = 1 - np.cumsum([0, *q[list(tokens[:-1])]])
        yield tokens, float(np.prod(q[list(tokens)] / left))


def drawn_trees(tree: TreeTopology, q):
    """Yield each filling of a tree, its nodes' paths of tokens, and its probability."""
    filled = [({0: ()}, 1.0)]
    for level in tree.levels:
        for parent in level.parents:
            children = [node for node in level.children if tree.parents[node] == parent]
            filled = [
                (paths | {node: (*paths[parent], t) for node, t in zip(children, tokens, strict=True)}, chance * c)
                for paths, chance in filled
                for tokens, c in draws(q(paths[parent]), len(children))
            ]
    return filled


def best_rule(tree: TreeTopology, p, q) -> float:
    """Return the accepted tokens of the best rule that keeps P: a linear program over verdicts (node, bonus token)."""
    filled = drawn_trees(tree, q)
    texts = list(itertools.product(range(V), repeat=tree.depth + 1))
    likely = [np.prod([p(text[:d])[text[d]] for d in range(len(text))]) for text in texts]
    gains, of_tree, of_text = [], [], []
    for number, (paths, _) in enumerate(filled):
        for path, bonus in itertools.product(paths.values(), range(V)):
            start = (*path, bonus)
            gains.append(len(path))
            of_tree.append(np.eye(len(filled))[number])
            follows = [np.prod([p(t[:d])[t[d]] for d in range(len(start), len(t))]) for t in texts]
            of_text.append([f * (text[: len(start)] == start) for f, text in zip(follows, texts, strict=True)])
    equal = np.concatenate([np.array(of_tree), np.array(of_text)], axis=1).T
    return -linprog(-np.array(gains), A_eq=equal, b_eq=[chance for _, chance in filled] + likely).fun


def toy(seed: int):
    """Return a distribution after every text of up to two tokens."""
    rng = np.random.default_rng(seed)
    return {t: rng.dirichlet(np.ones(V)) for d in range(3) for t in itertools.product(range(V), repeat=d)}.__getitem__


@pytest.mark.parametrize("name", TREES)
def test_no_rule_accepts_more_than_the_bound_and_a_chain_reaches_it(name):
    tree, p, q = TreeTopology.from_choices(TREES[name]), toy(1), toy(2)
    texts = list(itertools.product(range(V), repeat=tree.depth))
    log_q = jnp.log(jnp.array([[q(text[:d]) for d in range(tree.depth)] for text in texts]))
    chances = np.asarray(draw_chances(log_q, jnp.array(texts), 2))
    log_p = np.log([[p(text[:d])[text[d]] for d in range(tree.depth)] for text in texts])
    bound = float(np.exp(log_p.sum(axis=1)) @ accepted_shares(log_p, in_tree(chances, tree)).sum(axis=1))
    best = best_rule(tree, p, q)
    assert best <= bound + 1e-4
    if name == "chain":
        assert bound == pytest.approx(best, abs=1e-4)


def test_chances_of_draws(monkeypatch):
    """Against all orders of draws, with one clock that is not exact; equally likely tokens too."""
    monkeypatch.setattr("ceilings.LIKELY", 4)
    for q in (np.array([0.6, 0.3, 0.05, 0.049, 0.0009, 0.0001]), np.full(6, 1 / 6)):
        order = list(draws(q, 3))
        wanted = [[sum(chance for tokens, chance in order if tokens[r] == t) for r in range(3)] for t in range(6)]
        found = draw_chances(jnp.log(jnp.broadcast_to(q, (6, 6))), jnp.arange(6), 3)
        np.testing.assert_allclose(found, wanted, atol=0.02 if q[0] < 0.5 else 2e-4)
    assert not draw_chances(jnp.log(q), jnp.asarray(-1), 3).any()  # a token outside the draft's vocabulary


def test_steps():
    """All or nothing is accepted; half of the steps accept one token; nothing is accepted beyond the end."""
    assert expected_steps(np.zeros((5, 2))) == 5
    assert expected_steps(np.ones((5, 2))) == 2
    assert expected_steps(np.full((3, 1), 0.5)) == 1 + 0.5 + 0.75
