"""Greedy acceptance against a walk over rank paths in plain Python; exact sampling against the distribution."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets
from hydrajax.trees.tree import TreeTopology

VOCAB = 5  # small, so that siblings often hold the same token


def trees() -> list[TreeTopology]:
    """Random shapes, few of them: every tree is its own set of compiled operations."""
    random, made = np.random.default_rng(1), [presets.root(), presets.chain(3), TreeTopology.from_choices([[2]])]
    for n_choices in (4, 9, 20):
        known = {()}
        for _ in range(n_choices):
            shallow = sorted(path for path in known if len(path) < 4)
            known.add((*shallow[random.integers(len(shallow))], int(random.integers(4))))
        made.append(TreeTopology.from_choices(known - {()}))
    return made


TREES = trees()
accept = {
    tree: jax.jit(lambda logits, candidates, tree=tree: Greedy().accept(logits, candidates, tree, None))
    for tree in TREES
}


def walk(tree: TreeTopology, logits: np.ndarray, candidates: np.ndarray) -> tuple[list[int], int]:
    """``(accepted nodes from the root, next root)``: the longest path of agreeing tokens, the first of equally long."""
    node_of = {(): 0} | {path: i + 1 for i, path in enumerate(tree.choices)}
    accepted = [()]
    for path in accepted:  # grows while it is read
        wanted = max(range(VOCAB), key=lambda token: (logits[node_of[path]][token], -token))
        accepted += [c for c in tree.choices if c and c[:-1] == path and candidates[node_of[c]] == wanted]
    best = min(accepted, key=lambda path: (-len(path), node_of[path]))
    nodes = [node_of[best[:length]] for length in range(len(best) + 1)]
    return nodes, int(np.argmax(logits[nodes[-1]]))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TREES), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_greedy_matches_a_walk(tree, seed, agreement):
    """Random logits and tokens; some nodes are made to agree with their parent, so that long paths occur."""
    random = np.random.default_rng(seed)
    batch = 3
    # Few distinct values, so that ties of the best token occur too: the smallest id is the base's choice.
    logits = random.integers(0, 6, size=(batch, tree.size, VOCAB)).astype(np.float32)
    candidates = random.integers(0, VOCAB, size=(batch, tree.size), dtype=np.int32)
    node_of = {(): 0} | {path: i + 1 for i, path in enumerate(tree.choices)}
    for row in range(batch):
        for path, node in node_of.items():
            if path and random.random() < agreement:
                candidates[row, node] = np.argmax(logits[row, node_of[path[:-1]]])
    accepted = jax.device_get(accept[tree](logits, candidates))
    assert accepted.path.shape == (batch, tree.depth + 1)
    for row in range(batch):
        nodes, next_root = walk(tree, logits[row], candidates[row])
        event(f"accept_length {len(nodes) - 1}")
        assert accepted.accept_length[row] == len(nodes) - 1
        assert accepted.path[row].tolist() == nodes + [nodes[-1]] * (tree.depth + 1 - len(nodes))
        assert accepted.next_root[row] == next_root


def logits_choosing(tokens: list[int]) -> np.ndarray:
    return np.eye(VOCAB, dtype=np.float32)[None, tokens]


def test_of_siblings_with_the_same_token_the_first_wins():
    tree = TreeTopology.from_choices([[0], [1], [2]])
    accepted = Greedy().accept(logits_choosing([4, 0, 1, 2]), np.array([[3, 2, 4, 4]], np.int32), tree, None)
    assert accepted.path.tolist() == [[0, 2]]
    assert accepted.accept_length.tolist() == [1]
    assert accepted.next_root.tolist() == [1]


def test_of_siblings_with_the_same_token_the_one_with_the_longer_path_wins():
    tree = TreeTopology.from_choices([[0], [1], [1, 0]])
    accepted = Greedy().accept(logits_choosing([4, 2, 2, 0]), np.array([[3, 4, 4, 2]], np.int32), tree, None)
    assert accepted.path.tolist() == [[0, 2, 3]]
    assert accepted.accept_length.tolist() == [2]


def test_an_agreeing_node_under_a_rejected_one_is_rejected():
    tree = TreeTopology.from_choices([[0], [1], [0, 0], [0, 0, 0]])
    candidates = np.array([[3, 1, 2, 0, 0]], np.int32)  # the root wants 4: no child has it, all deeper nodes agree
    accepted = Greedy().accept(logits_choosing([4, 0, 0, 0, 0]), candidates, tree, None)
    assert accepted.path.tolist() == [[0, 0, 0, 0]]
    assert accepted.accept_length.tolist() == [0]
    assert accepted.next_root.tolist() == [4]


def test_first_root_is_the_smallest_best_token():
    logits = np.array([[0, 2, 1, 2, 0], [5, 5, 5, 5, 5]], np.float32)
    root = Greedy().first_root(logits, None)
    assert root.tolist() == [1, 0]
    assert root.dtype == np.int32


# --- exact sampling ---------------------------------------------------------------------------------------------------

TEMPERATURE = 0.7
SAMPLES = 20_000


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / TEMPERATURE)
    return weights / weights.sum(axis=-1, keepdims=True)


def within_four_sigma(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    n = counts.sum()
    return bool((np.abs(counts - n * probabilities) < 4 * np.sqrt(n * probabilities * (1 - probabilities)) + 1).all())


def test_samples_follow_the_bases_distribution_whatever_is_drafted():
    """The first two tokens after the root, over many keys, with fixed logits per context: a Markov chain of the base.

    The second token is known where the first draft was accepted: its distribution must not depend on that.
    """
    random = np.random.default_rng(0)
    after = random.normal(size=(VOCAB, VOCAB)).astype(np.float32)  # logits after each token
    tree = TreeTopology.from_choices([[0], [1], [0, 0], [1, 0]])
    candidates = np.array([2, 0, 3, 1, 3], np.int32)  # root 2; guesses 0 and 3, after them 1 and 3
    logits = np.broadcast_to(after[candidates], (SAMPLES, tree.size, VOCAB))
    batch = np.broadcast_to(candidates, (SAMPLES, tree.size))
    rule = ExactSampling(TEMPERATURE)
    accepted = jax.device_get(rule.accept(logits, batch, tree, jax.random.key(3)))
    tokens = candidates[accepted.path]  # [samples, 3], the last repeated beyond the accepted ones
    length = accepted.accept_length
    first = np.where(length >= 1, tokens[:, 1], accepted.next_root)
    assert within_four_sigma(np.bincount(first, minlength=VOCAB), softmax(after[2]))
    for guess, child in ((0, 1), (3, 3)):
        taken = (length >= 1) & (first == guess)
        # Every sample that equals a guess is accepted, none is turned into something else.
        assert taken.sum() == (first == guess).sum() > SAMPLES / 20
        second = np.where(length[taken] == 2, tokens[taken, 2], accepted.next_root[taken])
        assert within_four_sigma(np.bincount(second, minlength=VOCAB), softmax(after[guess]))
        assert (second[length[taken] == 2] == child).all()
        assert (second[length[taken] == 1] != child).all()
    assert not np.isin(first[length == 0], (0, 3)).any()


def test_without_a_tree_it_is_plain_sampling():
    logits = np.random.default_rng(1).normal(size=(1, 1, VOCAB)).astype(np.float32)
    many = np.broadcast_to(logits, (SAMPLES, 1, VOCAB))
    rule = ExactSampling(TEMPERATURE)
    accepted = rule.accept(many, np.zeros((SAMPLES, 1), np.int32), presets.root(), jax.random.key(0))
    assert within_four_sigma(np.bincount(accepted.next_root, minlength=VOCAB), softmax(logits[0, 0]))
    first = rule.first_root(many[:, 0], jax.random.key(1))
    assert first.dtype == np.int32
    assert within_four_sigma(np.bincount(first, minlength=VOCAB), softmax(logits[0, 0]))
    assert not within_four_sigma(np.bincount(first, minlength=VOCAB), softmax(logits[0, 0] * 1.2))  # it can fail


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(HydrajaxError, match="temperature: must be positive"):
        ExactSampling(temperature)
