"""Best-first trees against a heap, as DDTree and JetSpec define them, and against growing level by level."""

import heapq
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.refusals import refusal
from hydrajax.drafters.best_first import best_first
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.filling import fill
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree
from hydrajax.trees.tree_json import content_of, read_tree


def ranked(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens by depth, best first, and their log-probabilities in float64."""
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-log_p, axis=-1, kind="stable")
    return order, np.take_along_axis(log_p, order, axis=-1)


def by_heap(logits: np.ndarray, n: int) -> list[tuple[int, ...]]:
    """The n best paths of tokens: a pop adds a node, then its next sibling and its first child join the heap."""
    tokens, log_p = ranked(logits)
    heap, found = [(-log_p[0, 0], (0,))], []
    while heap and len(found) < n:
        score, path = heapq.heappop(heap)
        found.append(tuple(int(tokens[d, rank]) for d, rank in enumerate(path)))
        d = len(path) - 1
        if path[-1] + 1 < logits.shape[1]:
            step = log_p[d, path[-1] + 1] - log_p[d, path[-1]]
            heapq.heappush(heap, (score - step, (*path[:-1], path[-1] + 1)))
        if len(path) < len(logits):
            heapq.heappush(heap, (score - log_p[d + 1, 0], (*path, 0)))
    return found


def by_expansions(logits: np.ndarray, n: int, k: int) -> list[tuple[int, ...]]:
    """The nodes of JetSpec's builder: a pop adds all K children of a node, as many as fit."""
    tokens, log_p = ranked(logits)
    heap, found = [(0.0, 0, ())], []
    while heap and len(found) < n:
        score, _, path = heapq.heappop(heap)
        d = len(path)
        if d == len(logits):
            continue
        for rank in range(min(k, n - len(found))):
            child = (*path, int(tokens[d, rank]))
            found.append(child)
            heapq.heappush(heap, (score - log_p[d, rank], len(found), child))
    return found


def paths_of(proposal, row: int) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node that exists."""
    proposal, found = jax.device_get(proposal), []
    for node in range(1, proposal.tokens.shape[1]):
        if proposal.tokens[row, node] >= 0:
            path = proposal.tree.paths[row, node][1 : proposal.tree.depths[row, node] + 1]
            found.append(tuple(int(x) for x in proposal.tokens[row, path]))
    return found


LOGITS = np.random.default_rng(0).normal(scale=2.0, size=(3, 5, 11)).astype(np.float32)


@pytest.mark.parametrize("name", ["best-2", "best-40", "fanout-9-3", "fanout-40-4", "fanout-30-1"])
def test_nodes_are_those_of_a_heap_in_the_same_order(name):
    tree = presets.by_name(name).reaching(5)
    proposal = jax.jit(lambda x: best_first(tree, jnp.full(3, 7), x, LmHead()))(LOGITS)
    assert proposal.tokens.shape == (3, tree.size)
    for row in range(3):
        n = tree.size - 1
        expected = by_expansions(LOGITS[row], n, tree.top_k) if tree.top_k else by_heap(LOGITS[row], n)
        assert paths_of(proposal, row) == expected


def test_growing_level_by_level_finds_the_same_nodes():
    """Drafts of several passes grow ``best-N`` from N - 1 candidates per level; the order of nodes differs."""
    tree = presets.by_name("best-12").reaching(5)

    def guess(carry, beam):
        return carry, jnp.asarray(LOGITS)[:, beam.depth, None]

    grown = jax.jit(lambda: fill(tree, jnp.full(3, 7), guess, None, LmHead(), 11)[0])()
    for row in range(3):
        assert set(paths_of(grown, row)) == set(by_heap(LOGITS[row], 11))


def test_a_reduced_vocabulary_gives_token_ids():
    known = Vocabulary(range(100, 111))
    tree = presets.by_name("best-9").reaching(5)
    proposal = jax.jit(lambda x: best_first(tree, jnp.full(3, 7), x, LmHead(vocabulary=known)))(LOGITS)
    for row in range(3):
        assert paths_of(proposal, row) == [tuple(x + 100 for x in path) for path in by_heap(LOGITS[row], 8)]


@pytest.mark.parametrize("name", ["best-64", "fanout-128-7"])
def test_names_and_files(name, tmp_path):
    tree = presets.by_name(name)
    assert tree.name == name == tree.reaching(7).name
    (tmp_path / "tree.json").write_text(json.dumps(content_of(tree)))
    assert read_tree(tmp_path / "tree.json") == tree
    refusal(lambda: tree.depth, f"got {name} without a drafter")
    assert tree.reaching(7).depth == 7


def test_errors(tmp_path):
    for make, message in (
        (lambda: BestFirstTree(1), "got best-1, expected 2 to 4096 nodes"),
        (lambda: presets.by_name("fanout-8-0"), "got 'fanout-8-0'"),
        (lambda: BestFirstTree(8).reaching(0), "got best-8, expected root: the draft proposes no token"),
        (
            lambda: BestFirstTree(8, top_k=9).check(4, 8),
            "got 9 children per node, expected at most the vocabulary of 8",
        ),
    ):
        refusal(make, message)
    for content in (
        {"best_first": {"nodes": 8, "depth": 3}},
        {"best_first": {"nodes": "8"}},
        {"best_first": {"nodes": 8, "fanout": 0}},
        {"best_first": [8]},
        {"best_first": {"nodes": 8}, "choices": [[0]]},
    ):
        (tmp_path / "tree.json").write_text(json.dumps(content))
        refusal(lambda: read_tree(tmp_path / "tree.json"), "best_first: ")
