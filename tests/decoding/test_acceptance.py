"""Compare greedy acceptance with a walk over rank paths in plain Python, and typical acceptance with one in NumPy."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from helpers.how import per_row
from helpers.lab import quick_jit
from helpers.refusals import assert_refused
from helpers.tree_tools import random_tree, typical_walk
from hydrajax.certify.certificate import shaped
from hydrajax.decoding.acceptance import Greedy, VerifyResult
from hydrajax.decoding.processing import TokenCounts, batched_processors
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.typical import Typical
from hydrajax.drafters.drafter import Proposal
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

VOCAB = 5  # small, so that siblings often have the same token


# A few random shapes: every tree is compiled.
TREES = [presets.root(), presets.chain(3), TreeTopology.from_choices([[2]])]
TREES += [random_tree(n_choices, n_choices, depth=4, widest=4) for n_choices in (5, 12, 26)]


@functools.partial(quick_jit, static_argnames="tree")
def accept(rule, logits, tokens, tree):
    """Return the nodes that a rule accepts. Its numbers are arguments, so a tree compiles once per kind of rule."""
    return rule.accept(VerifyResult(logits, Proposal(tokens, tree.topology)), None)


def walk(tree: TreeTopology, logits: np.ndarray, candidates: np.ndarray) -> tuple[list[int], int]:
    """Return ``(accepted nodes from the root, bonus token)``: the first of the longest paths of agreeing tokens."""
    node_of = {(): 0} | {path: i + 1 for i, path in enumerate(tree.choices)}
    accepted = [()]
    for path in accepted:  # grows during iteration
        wanted = max(range(VOCAB), key=lambda token: (logits[node_of[path]][token], -token))
        accepted += [c for c in tree.choices if c and c[:-1] == path and candidates[node_of[c]] == wanted]
    best = min(accepted, key=lambda path: (-len(path), node_of[path]))
    nodes = [node_of[best[:length]] for length in range(len(best) + 1)]
    return nodes, int(np.argmax(logits[nodes[-1]]))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TREES), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_greedy_matches_a_walk(tree, seed, agreement):
    """Logits and tokens are random, but some nodes agree with their parent so that long paths occur."""
    random = np.random.default_rng(seed)
    batch = 3
    # Few distinct values, so that ties occur: of equal logits the smallest token id wins.
    logits = random.integers(0, 6, size=(batch, tree.size, VOCAB)).astype(np.float32)
    candidates = random.integers(0, VOCAB, size=(batch, tree.size), dtype=np.int32)
    node_of = {(): 0} | {path: i + 1 for i, path in enumerate(tree.choices)}
    for row in range(batch):
        for path, node in node_of.items():
            if path and random.random() < agreement:
                candidates[row, node] = np.argmax(logits[row, node_of[path[:-1]]])
    accepted = jax.device_get(accept(Greedy(), logits, candidates, tree))
    assert accepted.path.shape == (batch, tree.depth + 1)
    for row in range(batch):
        nodes, bonus_token = walk(tree, logits[row], candidates[row])
        event(f"accept_length {len(nodes) - 1}")
        assert accepted.accept_length[row] == len(nodes) - 1
        assert accepted.path[row].tolist() == nodes + [nodes[-1]] * (tree.depth + 1 - len(nodes))
        assert accepted.bonus_token[row] == bonus_token


def test_first_root_is_the_smallest_best_token():
    logits = np.array([[0, 2, 1, 2, 0], [5, 5, 5, 5, 5]], np.float32)
    root = Greedy().first_root(logits, None)
    assert root.tolist() == [1, 0]
    assert root.dtype == np.int32


@pytest.mark.parametrize(
    "rule",
    [Typical(0.2, 0.6, 0.7, top_k=4), Typical(0.2, temperature=1.5, top_p=0.8), Typical(0.1, min_p=0.2)],
    ids=["top-k", "top-p", "min-p"],
)
@pytest.mark.quick("top-p")
def test_typical_with_cuts_and_processors_matches_a_walk(rule):
    """Processors depend on the path to a node, because each node has its own preceding tokens."""
    batch, tree, random = 40, TREES[-1], np.random.default_rng(7)
    logits = random.normal(size=(batch, tree.size, VOCAB)).astype(np.float32) * 1.5
    candidates = random.integers(-1, VOCAB, size=(batch, tree.size), dtype=np.int32)
    candidates[:, 0] = random.integers(0, VOCAB, batch)
    prompts, output = random.integers(0, VOCAB, (2, batch, 3), dtype=np.int32)
    bias = LogitBias({1: 1.0, 4: -0.5})
    rows = [(bias, Penalties(repetition_penalty=1.5, frequency_penalty=row / batch)) for row in range(batch)]

    @quick_jit
    def accept(rule, processors, logits, tokens, prompts, output):
        three = np.full(batch, 3, np.int32)
        counts = TokenCounts.of_prompt(prompts, three, VOCAB).with_output(output, three)
        return rule.accept(VerifyResult(logits, Proposal(tokens, tree.topology), processors, counts), None)

    found = jax.device_get(
        accept(per_row(rule, batch), batched_processors(rows, VOCAB), logits, candidates, prompts, output)
    )
    lengths, changed = set(), 0
    for row, processors in enumerate(rows):
        processed = logits[row].astype(np.float64)
        for node in range(tree.size):
            path = [candidates[row, each] for each in tree.node_paths[node][: tree.depths[node] + 1]]
            for processor in processors:
                processed[node] = processor.reference(processed[node], prompts[row], [*output[row], *path])
        p = np.stack([shaped(node, rule) for node in processed])
        nodes = typical_walk(rule, tree.parents, p, candidates[row])
        assert found.path[row].tolist() == nodes + [nodes[-1]] * (tree.depth + 1 - len(nodes))
        assert found.bonus_token[row] == np.argmax(processed[nodes[-1]])
        lengths.add(len(nodes))
        plain = np.stack([shaped(node, rule) for node in logits[row].astype(np.float64)])
        changed += typical_walk(rule, tree.parents, plain, candidates[row]) != nodes
    assert len(lengths) > 1
    assert changed > 5


def test_typical_rejects_numbers_out_of_range():
    assert_refused(
        lambda numbers: Typical(**numbers),
        ({"top_k": 0}, "top_k: got 0, expected an integer from 1 up"),
        ({"min_p": 1.5}, "min_p: got 1.5, expected a number from 0 to 1"),
        ({"epsilon": -0.1}, "epsilon: got -0.1, expected a number from 0 to 1"),
        ({"epsilon": float("nan")}, "epsilon: got nan, expected a number from 0 to 1"),
        ({"alpha": -1.0}, "alpha: got -1.0, expected a number from 0 up"),
        ({"temperature": 0.0}, "temperature: got 0.0, expected a positive number"),
    )
