"""Compare dynamic trees with plain Python, one sequence and one candidate at a time."""

import itertools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.lab import quick_jit
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw
from hydrajax.drafters.growing import grow
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.trees.dynamic import DynamicTree

VOCAB, BATCH = 19, 4
FULL = LmHead()
TREES = [DynamicTree(8, 2, 3), DynamicTree(30, 4, 5), DynamicTree(7, 5, 1), DynamicTree(6, 0, 5), DynamicTree(2, 1, 4)]


def tables(seed: int) -> np.ndarray:
    """Return logits float32 ``[depth, token, next token]``, some of them nearly certain."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(6, VOCAB, VOCAB)) * random.choice([1, 4], (6, VOCAB, 1))).astype(np.float32)


def grown(tree: DynamicTree, logits, roots, lm_head: LmHead = FULL):
    """Return the trees of a draft that depends on the last token and the depth only."""

    @quick_jit
    def run(logits, roots):
        def guess(beams, beam):
            beams.append(beam)
            return beams, jnp.take(logits[beam.depth], beam.tokens, axis=0)

        beams = []
        return grow(tree, roots, guess, beams, lm_head, VOCAB)[0], beams[1:]

    return jax.device_get(run(logits, roots))


def next_beam(tree: DynamicTree, level: list[tuple], first: int) -> list[tuple]:
    """Return the likeliest candidates of a level as (likelihood, candidate, number); ``first`` is the first number."""
    order = sorted(range(len(level)), key=lambda i: -level[i][0])[: tree.top_k]
    return [(level[i][0], level[i][1], first + i) for i in order]


def chosen(tree: DynamicTree, candidates: list[tuple], worth: int) -> tuple[list[int], list[int]]:
    """Return the candidates that become nodes, in order, and the parents of all nodes. Entry 2 of a candidate is its
    parent candidate, None for the root; entry ``worth`` is its score.
    """
    nodes = sorted(sorted(range(len(candidates)), key=lambda i: -candidates[i][worth])[: tree.size - 1])
    parents = [0 if candidates[i][2] is None else 1 + nodes.index(candidates[i][2]) for i in nodes]
    return nodes, [-1, *parents]


def by_hand(tree: DynamicTree, logits: np.ndarray, root: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents in node order; a candidate is (score, path of tokens, parent candidate)."""
    log_p = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    beam, candidates = [(0.0, [root], None)], []
    for depth in range(tree.expansions + 1):
        level = []
        for score, path, number in beam:
            best = np.argsort(-log_p[depth, path[-1]], kind="stable")[: tree.top_k]
            level += [(score + log_p[depth, path[-1], token], [*path, int(token)], number) for token in best]
        beam = next_beam(tree, level, len(candidates))
        candidates += level
    nodes, parents = chosen(tree, candidates, worth=0)
    return [root, *(candidates[i][1][-1] for i in nodes)], parents


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.quick("dynamic-8-2-3", "dynamic-6-0-5")
def test_the_likeliest_candidates_become_nodes(tree):
    roots = np.arange(BATCH, dtype=np.int32)
    for seed in range(2):
        logits = tables(seed)
        proposal, beams = grown(tree, logits, roots)
        for row in range(BATCH):
            tokens, parents = by_hand(tree, logits, int(roots[row]))
            assert proposal.tokens[row].tolist() == tokens
            assert proposal.tree.parents[row].tolist() == parents
        for beam in beams:  # the arguments of a drafter are consistent
            assert beam.paths.shape == (BATCH, tree.top_k, beam.depth + 1)
            assert (beam.paths[:, :, 0] == roots[:, None]).all()
        for above, beam in itertools.pairwise(beams):
            np.testing.assert_array_equal(
                beam.paths[:, :, :-1], np.take_along_axis(above.paths, beam.parents[:, :, None], axis=1)
            )


def test_nodes_of_a_certain_draft_keep_their_parents():
    """All scores are equal: a child is exactly as likely as its parent."""
    logits = np.zeros((6, VOCAB, VOCAB), np.float32)
    logits[:, :, :3] = 200.0  # three tokens of probability one third; all others are exactly 0
    logits[:, 2, 0] = 500.0  # only one token can follow token 2, with log-probability exactly 0
    proposal, _ = grown(DynamicTree(20, 3, 4), logits, np.full(2, 2, np.int32))
    parents = proposal.tree.parents
    assert ((parents[:, 1:] >= 0) & (parents[:, 1:] < np.arange(1, 20))).all()
    assert proposal.tokens[0, 1] == 0
    for row in range(2):
        of_each = [proposal.tokens[row][parents[row] == node].tolist() for node in range(20)]
        assert all(len(set(tokens)) == len(tokens) for tokens in of_each)


def test_a_vocabulary_of_fewer_tokens_than_candidates():
    """Missing nodes have token -1, which no rule accepts, and come last."""
    logits, tree = tables(3), DynamicTree(12, 2, 5)
    known = Vocabulary([2, 5, 11])
    proposal, _ = grown(tree, logits[:, :, :3], np.arange(BATCH, dtype=np.int32), LmHead(vocabulary=known))
    assert set(np.unique(proposal.tokens[:, 1:])) <= {2, 5, 11, -1}
    assert (proposal.tokens[:, 1:] >= 0).any(axis=1).all()
    parents = proposal.tree.parents
    for row, node in zip(*np.nonzero(proposal.tokens < 0), strict=True):
        assert not (proposal.tokens[row][parents[row] == node] >= 0).any()


@dataclass(frozen=True)
class Watched(LmHead):
    """Record the samples for the reference computation."""

    kept: list = field(default_factory=list, compare=False)

    def drawn(self, keys, logits, k):
        children, log_p = super().drawn(keys, logits, k)
        self.kept.append(children)
        return children, log_p


def drawn(tree: DynamicTree, logits, roots, temperature, vocabulary: Vocabulary | None = None, seed: int = 0):
    """Return the proposal, its beams and the sampled children of every node of each beam."""

    @quick_jit
    def run(logits, roots, temperature):
        def guess(beams, beam):
            beams.append(beam)
            return beams, jnp.take(logits[beam.depth], beam.tokens, axis=0)

        beams, lm_head = [], Watched(vocabulary=vocabulary)
        keys = jax.random.split(jax.random.key(seed), (len(roots), tree.depth + 1))
        proposal, _ = grow(tree, roots, guess, beams, lm_head, VOCAB, Draw(keys, temperature))
        return proposal, beams, lm_head.kept

    return jax.device_get(run(logits, roots, np.asarray(temperature, np.float32)))


def drawn_by_hand(tree: DynamicTree, logits: np.ndarray, root: int, temperature: float, children: list[np.ndarray]):
    """Return tokens, parents and log q of one sequence from the sampled children of each beam."""
    scaled = logits.astype(np.float64) / temperature
    q = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    q /= q.sum(axis=-1, keepdims=True)
    beam, candidates = [(1.0, root, None)], []  # likelihood, token, number
    for depth in range(tree.expansions + 1):
        level = []
        for place, (worth, token, number) in enumerate(beam):
            left = 1.0
            for child in children[depth][place]:
                accepted = 0.5 + 0.4 * q[depth, token, child] / left
                level.append((worth * accepted, int(child), number, worth, scaled[depth, token]))
                left -= q[depth, token, child]
                worth *= 1 - accepted
        beam = next_beam(tree, level, len(candidates))
        candidates += level
    nodes, parents = chosen(tree, candidates, worth=3)
    return [root, *(candidates[i][1] for i in nodes)], parents, [candidates[i][4] for i in nodes]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.quick("dynamic-8-2-3")
def test_sampled_candidates_at_the_best_positions_become_nodes(tree):
    roots, temperatures, logits = np.arange(BATCH, dtype=np.int32), [0.7, 1.0, 1.3, 2.0], tables(4)
    proposal, _, children = drawn(tree, logits, roots, temperatures)
    for row in range(BATCH):
        mine = [of_level[row] for of_level in children]
        tokens, parents, above = drawn_by_hand(tree, logits, int(roots[row]), temperatures[row], mine)
        assert proposal.tokens[row].tolist() == tokens
        assert proposal.tree.parents[row].tolist() == parents
        slots = proposal.tree.parent_slot[row, 1:]
        np.testing.assert_allclose(proposal.log_q[row, slots], above, rtol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "scale"),
    [(Vocabulary([2, 5, 11]), 1), (Vocabulary([2, 5, 11]), 200), pytest.param(None, 1, marks=pytest.mark.slow)],
)
def test_sampled_trees_are_prefix_closed(scale, vocabulary):
    """The children of a node are its first samples; missing ones are -1 and come last."""
    tree, roots = DynamicTree(24, 3, 5), np.arange(60, dtype=np.int32) % VOCAB
    logits = scale * tables(5)[:, :, : len(vocabulary) if vocabulary else VOCAB]
    proposal, beams, children = drawn(tree, logits, roots, np.ones(60), vocabulary)
    n_certain = 0
    for row, parents in enumerate(proposal.tree.parents):
        assert ((parents[1:] >= 0) & (parents[1:] < np.arange(1, tree.size))).all()
        order = {
            tuple(path): below
            for beam, of_level in zip(beams, children, strict=True)
            for path, below in zip(beam.paths[row].tolist(), of_level[row].tolist(), strict=True)
            if -1 not in path
        }
        paths = {0: (int(roots[row]),)}
        for node in range(1, tree.size):
            paths[node] = (*paths[parents[node]], int(proposal.tokens[row, node]))
        for node, path in paths.items():
            below = proposal.tokens[row][parents == node].tolist()
            if below and -1 not in path:
                assert below == order[path][: len(below)]
                n_certain += np.exp(proposal.log_q[row, node] - proposal.log_q[row, node].max()).sum() == 1
        assert proposal.tokens[row].max() >= 0
    assert (n_certain > 60) == (scale == 200)
    known = vocabulary.tokens if vocabulary else np.arange(VOCAB)
    assert (np.isfinite(proposal.log_q).all(axis=(0, 1)) == np.isin(np.arange(VOCAB), known)).all()
