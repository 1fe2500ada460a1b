"""Choose a tree by measured speed: the size of static trees (hydra section 4), N, D and K of dynamic trees.

Every tree costs a compilation, so N, D and K are chosen one after the other in short contests of few trees. The trees
that remain run in one final contest on the same prompts, so that its figures are comparable.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hydrajax.bench.contests.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology

EXPANSIONS = (1, 2, 3, 4, 5, 7, 9)  # D, up to the depth of the drafter; EAGLE-2 has 7
TOP_K = (2, 4, 8, 12)  # EAGLE-2 has 10
FIRST_EXPANSIONS, FIRST_TOP_K = 3, 4  # until the best are measured
SMALLEST = 4  # nodes; with fewer, all expansions and top-k give the same tree
QUICK_ROUNDS = 3  # of the contests before the final one
Tree = TypeVar("Tree", bound=CandidateTree)
Race = Callable[[Sequence[CandidateTree], int, str], list[Measured]]


@dataclass
class Search:
    """The outcome of a search.

    Attributes:
        trees: Those of the final contest, by name.
        tried: Figures of the contests before it, one list each.
    """

    trees: dict[str, CandidateTree]
    rows: list[Measured]
    tried: list[list[Measured]] = field(default_factory=list)

    @property
    def fastest(self) -> Measured:
        return max(self.rows, key=lambda row: row.tokens_per_second)


def races(executor: Executor, prompts: Sequence[np.ndarray], on_status: Callable[[str], None], **settings: int) -> Race:
    """Return ``run(trees, repeats, purpose)``, which returns each tree's figures relative to decoding without a draft.

    Each tree is compiled once. ``settings`` are ``batch_size`` and ``seed`` of `contest`.
    """
    plain, with_tree = executor.autoregressive(), functools.cache(lambda tree: executor.with_program(tree=tree))

    def run(trees: Sequence[CandidateTree], repeats: int, purpose: str) -> list[Measured]:
        entrants = {AUTOREGRESSIVE: plain} | {name_of(tree): with_tree(tree) for tree in trees}
        told = {"on_status": lambda text: on_status(f"{purpose}: {text}")}
        return contest(entrants, prompts, repeats=repeats, **settings, **told)[1:]

    return run


def name_of(tree: CandidateTree) -> str:
    """Return the name of a tree within a search; a static tree is named by its size, which is unique."""
    return tree.name if isinstance(tree, DynamicTree) else str(tree.size)


def search(
    race: Race,
    static: Sequence[TreeTopology],
    sizes: Sequence[int],
    grows: Callable[[DynamicTree], bool] | None,
    repeats: int,
    *,
    all_sizes: bool = False,
    one_pass: bool = False,
) -> Search:
    """Time static and dynamic trees.

    First N is the size of the fastest static tree or, without static trees, of the fastest with `FIRST_EXPANSIONS` and
    `FIRST_TOP_K`. At this N the fastest of `EXPANSIONS` is D, then the fastest of `TOP_K` is K. The final contest has
    all static trees and dynamic trees of this D and K with N / 2 to 2 N nodes, or of all sizes. A draft of one pass has
    ``best-N`` trees of these sizes instead.

    Args:
        grows: whether a dynamic tree can be used; None to try none.
    """
    tried: list[list[Measured]] = []

    def fastest_of(trees: Sequence[Tree], number: str) -> Tree:
        if len(trees) == 1:
            return trees[0]
        rows = race(trees, min(QUICK_ROUNDS, repeats), f"choosing the {number}")
        tried.append(rows)
        return max(zip(rows, trees, strict=True), key=lambda found: found[0].tokens_per_second)[1]

    trees: list[CandidateTree] = list(static)
    entrants: Sequence[CandidateTree]
    sizes = [size for size in sizes if size > 1]  # the root alone is a static tree
    if grows is not None and sizes and one_pass:
        entrants = trees or [BestFirstTree(size) for size in sizes]
        begin = max(fastest_of(entrants, "number of nodes").size, SMALLEST)
        trees += [BestFirstTree(size) for size in sizes if all_sizes or begin / 2 <= size <= 2 * begin]
    elif grows is not None and sizes:
        depths = [d for d in EXPANSIONS if grows(DynamicTree(d + 2, d, 1))] or [0]  # the smallest tree of this depth
        first = max(d for d in depths if d <= FIRST_EXPANSIONS)
        entrants = trees or _distinct(sizes, [first], [FIRST_TOP_K], grows)
        begin = fastest_of(entrants, "number of nodes").size
        near = [size for size in sizes if all_sizes or begin / 2 <= size <= 2 * max(begin, SMALLEST)]
        if begin < SMALLEST:
            begin = min((size for size in sizes if size >= SMALLEST), default=max(sizes))
        d = fastest_of(_distinct([begin], depths, [FIRST_TOP_K], grows), "number of expansions").expansions
        k = fastest_of(_distinct([begin], [d], TOP_K, grows), "number of children").top_k
        trees += _distinct(near, [d], [k], grows)
    return Search({name_of(tree): tree for tree in trees}, race(trees, repeats, "measuring"), tried)


def usable(size: int, expansions: int, top_k: int) -> DynamicTree:
    """Return the dynamic tree nearest to these numbers that can fill its ``size`` nodes.

    D and K are at most what ``size`` nodes can use; with too few candidates, K is the next larger of `TOP_K`.
    """
    expansions = min(expansions, size - 2)
    enough = [k for k in (top_k, *TOP_K, size - 1) if k >= top_k and k + expansions * k**2 >= size - 1]
    return DynamicTree(size, expansions, min(enough[0], size - 1))


def _distinct(
    sizes: Sequence[int], expansions: Sequence[int], top_k: Sequence[int], grows: Callable[[DynamicTree], bool]
) -> list[DynamicTree]:
    """The usable trees of all combinations, each once. Raises `HydrajaxError` if there are none."""
    trees = [usable(*numbers) for numbers in itertools.product(sizes, expansions, top_k)]
    found = [tree for tree in dict.fromkeys(trees) if grows(tree)]
    if not found:
        raise HydrajaxError(
            f"shapes: no dynamic tree of {min(sizes)} to {max(sizes)} nodes fits this draft; use --shapes static"
        )
    return found
