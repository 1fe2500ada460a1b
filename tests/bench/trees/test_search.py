"""Compare tree search with exhaustive search and closed forms, and chains with the forms of Leviathan et al."""

import itertools

import numpy as np
import pytest

from helpers.refusals import assert_refused
from hydrajax.bench.trees.search import WIDEST, Proposals, accuracies, independent, simulated
from hydrajax.bench.trees.speculation import best_length, expected_tokens, improvement

# Accuracies of the five best guesses of four heads; those of the second head are not in order.
ACCURACIES = np.array([
    [0.50, 0.20, 0.10, 0.05, 0.02], [0.40, 0.04, 0.12, 0.05, 0.01],
    [0.30, 0.15, 0.10, 0.03, 0.01], [0.25, 0.10, 0.05, 0.02, 0.01],
])  # fmt: skip
WRONG = 99  # a rank beyond every guess


def all_paths(ranks: int, depth: int) -> list[tuple[int, ...]]:
    return [path for n in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=n)]


def drawn(seed: int, rows: int, length: int) -> np.ndarray:
    """Draw independent ranks ``[4, rows, length]`` of heads with `ACCURACIES`."""
    random = np.random.default_rng(seed)
    ranks = np.stack([np.searchsorted(np.cumsum(row), random.random((rows, length))) for row in ACCURACIES])
    return np.where(ranks >= ACCURACIES.shape[1], WRONG, ranks)


def test_every_size_up_to_40_has_the_likeliest_paths():
    """For independent heads the best tree of N nodes has the N - 1 paths with the largest products."""
    products = {path: np.prod(ACCURACIES[range(len(path)), path]) for path in all_paths(5, 4)}
    largest = sorted(products.values(), reverse=True)
    found = independent(ACCURACIES, 40)
    for size in range(1, 41):
        tree = found.tree(size)  # raises for an invalid tree
        assert tree.size == size
        assert sum(products[path] for path in tree.choices) == pytest.approx(sum(largest[: size - 1]))
        assert found.tokens_per_step[size - 1] == pytest.approx(1 + sum(largest[: size - 1]))
    assert np.all(np.diff(found.tokens_per_step) > 0)


def decoded(choices, ranks, spans) -> tuple[int, list[tuple[int, int]]]:
    """Simulate decoding in a loop: ``(steps, [(sequence, position, tokens that may follow the root)])``."""
    begun = []
    for row, start, end in spans:
        while start < end:
            room = end - start - 1
            begun.append((row, start - 1, room))
            path = tuple(ranks[:, row, start - 1])
            accepted = max((len(c) for c in choices if path[: len(c)] == c), default=0)
            start += 1 + min(accepted, room)
    return len(begun), begun


def test_simulated_growth_equals_a_plain_loop():
    """At every size: decode with the current tree, count the tokens that each child would have added."""
    ranks, spans = drawn(3, 3, 60), [(0, 4, 60), (1, 1, 33), (2, 20, 60)]
    n_tokens = sum(end - start for _, start, end in spans)
    found = simulated(ranks, spans, 12)
    choices: list[tuple[int, ...]] = []
    for size in range(1, 13):
        steps, begun = decoded(choices, ranks, spans)
        assert found.tokens_per_step[size - 1] == pytest.approx(n_tokens / steps)
        if size == 12:
            break
        gains = {}
        for row, at, room in begun:
            path = tuple(ranks[:, row, at].tolist())
            for n in range(1, min(len(path), room) + 1):
                if path[n - 1] < WIDEST and (n == 1 or path[: n - 1] in choices) and path[:n] not in choices:
                    gains[path[:n]] = gains.get(path[:n], 0) + 1
        choices.append(min(gains, key=lambda path: (-gains[path], len(path), path)))
        assert found.choices[size - 1] == choices[-1]


def test_edges_of_a_search():
    """Accuracies are shares of ranks; paths that were never right are not added."""
    found = accuracies(np.array([[0, 0, 1, WRONG], [2, WRONG, WRONG, 2]]))
    assert found.shape == (2, WIDEST)
    np.testing.assert_allclose(found[:, :3], [[0.5, 0.25, 0], [0, 0, 0.5]])
    wrong = np.full((2, 4), WRONG)
    found = simulated(wrong[:, None], [(0, 1, 4)], 10)
    assert found == Proposals((), (1.0,))
    assert_refused(found.tree, (2, "got size 2, expected 1 to 1, which were searched"))


def test_expected_tokens_by_enumeration():
    """Enumerate all 2^K outcomes of K drafted tokens; the first rejection ends the step."""
    for alpha, k in itertools.product((0.0, 0.3, 0.999, 1.0), (0, 1, 2, 9)):
        total = 0.0
        for accepted in itertools.product([True, False], repeat=k):
            chance = 1.0
            for one in accepted:
                chance *= alpha if one else 1 - alpha
            total += chance * (1 + (accepted.index(False) if False in accepted else k))
        assert expected_tokens(alpha, k) == pytest.approx(total, rel=1e-9)


def test_best_length_is_optimal():
    for alpha, c in itertools.product((0.0, 0.4, 0.8, 0.95, 1.0), (0.0, 0.02, 0.1, 0.5, 1.2)):
        best = best_length(alpha, c, 12)
        assert all(improvement(alpha, best, c) >= improvement(alpha, k, c) for k in range(13))
        # Corollary 3.9: a chain pays exactly if alpha > c, and then even a chain of one token does.
        assert (best > 0) == (alpha > c)
        assert alpha <= c or improvement(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))
