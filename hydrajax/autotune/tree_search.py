"""Choosing a tree by measured speed: of static trees the size (hydra section 4), of dynamic ones N, D and K.

Every tree costs a compilation, so of the three numbers of a dynamic tree one is chosen after the other, each with the
others fixed, in contests of a few rounds among few trees. What is still in the race meets in one last contest, whose
rounds take all of them on the same prompts, so that its figures can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hydrajax.autotune.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology

EXPANSIONS = (1, 2, 3, 4, 5, 7, 9)  # D, as far as the drafter looks ahead; EAGLE-2 has 7
TOP_K = (2, 4, 8, 12)  # EAGLE-2 has 10
FIRST_EXPANSIONS, FIRST_TOP_K = 3, 4  # until the best are known
SMALLEST = 4  # nodes: of fewer, expansions and children cannot be told apart
QUICK_ROUNDS = 3  # of the contests before the last one
Tree = TypeVar("Tree", bound=CandidateTree)


@dataclass
class Search:
    """What was found. trees: all that were in the last contest, by name. rows: its figures, in the same order.

    tried: figures of the contests before it, one list each.
    """

    trees: dict[str, CandidateTree]
    rows: list[Measured]
    tried: list[list[Measured]] = field(default_factory=list)

    @property
    def fastest(self) -> Measured:
        return max(self.rows, key=lambda row: row.tokens_per_second)


class Race:
    """Trees of one executor, timed in contests on the same prompts; each is compiled once."""

    def __init__(
        self,
        executor: Executor,
        prompts: Sequence[np.ndarray],
        *,
        batch_size: int,
        seed: int = 0,
        on_status: Callable[[str], None] = lambda text: None,
    ):
        self._executor, self._prompts = executor, prompts
        self._batch_size, self._seed = batch_size, seed
        self._on_status = on_status
        self._plain = executor.autoregressive()
        self._with_tree: dict[CandidateTree, Executor] = {}

    def run(self, trees: Sequence[CandidateTree], repeats: int, what: str) -> list[Measured]:
        """Return the figures of each tree, with decoding without a draft as baseline. what: the contest's purpose."""
        for tree in trees:
            if tree not in self._with_tree:
                self._with_tree[tree] = self._executor.with_spec(tree=tree)
        entrants = {name_of(tree): self._with_tree[tree] for tree in trees}
        return contest(
            {AUTOREGRESSIVE: self._plain} | entrants,
            self._prompts,
            batch_size=self._batch_size,
            repeats=repeats,
            seed=self._seed,
            on_status=lambda text: self._on_status(f"{what}: {text}"),
        )[1:]


def name_of(tree: CandidateTree) -> str:
    """What a tree is called in the table of a search: a static one, of which there is one of each size, by its size."""
    return tree.name if isinstance(tree, DynamicTree) else str(tree.size)


def search(
    race: Race,
    static: Sequence[TreeTopology],
    sizes: Sequence[int],
    grows: Callable[[DynamicTree], bool] | None,
    repeats: int,
    *,
    all_sizes: bool = False,
) -> Search:
    """Time the static trees, and dynamic ones beside them.

    sizes: N, of dynamic trees. grows: whether a dynamic tree can be used at all; None to try none.

    First of all N: the size of the fastest static tree or, where there are no static ones, of the fastest with
    `FIRST_EXPANSIONS` and `FIRST_TOP_K`. At this N the fastest of `EXPANSIONS` is D, and with that the fastest of
    `TOP_K` is K. In the last contest are all static trees and, with this D and K, the sizes from half of this N to
    twice as many, or ``all_sizes``.
    """
    tried: list[list[Measured]] = []

    def fastest_of(trees: Sequence[Tree], what: str) -> Tree:
        if len(trees) == 1:
            return trees[0]
        rows = race.run(trees, min(QUICK_ROUNDS, repeats), f"choosing the {what}")
        tried.append(rows)
        return max(zip(rows, trees, strict=True), key=lambda found: found[0].tokens_per_second)[1]

    trees: list[CandidateTree] = list(static)
    sizes = [size for size in sizes if size > 1]  # of the root alone there is but one tree
    if grows is not None and sizes:
        depths = [d for d in EXPANSIONS if grows(DynamicTree(d + 2, d, 1))] or [0]  # the smallest tree that is as deep
        first = max(d for d in depths if d <= FIRST_EXPANSIONS)
        entrants: Sequence[CandidateTree] = trees or _distinct(sizes, [first], [FIRST_TOP_K], grows)
        begin = fastest_of(entrants, "number of nodes").size
        near = [size for size in sizes if all_sizes or begin / 2 <= size <= 2 * max(begin, SMALLEST)]
        if begin < SMALLEST:
            begin = min((size for size in sizes if size >= SMALLEST), default=max(sizes))
        d = fastest_of(_distinct([begin], depths, [FIRST_TOP_K], grows), "number of expansions").expansions
        k = fastest_of(_distinct([begin], [d], TOP_K, grows), "number of children").top_k
        trees += _distinct(near, [d], [k], grows)
    return Search({name_of(tree): tree for tree in trees}, race.run(trees, repeats, "measuring"), tried)


def usable(size: int, expansions: int, top_k: int) -> DynamicTree:
    """The tree of so many nodes that is nearest to these numbers and wastes none of them.

    No path is longer than ``size`` - 1, no node keeps more than ``size`` - 1 children; and where there are too few
    candidates for the nodes, K is the next larger of `TOP_K` that gives enough.
    """
    expansions = min(expansions, size - 2)
    enough = [k for k in (top_k, *TOP_K, size - 1) if k >= top_k and k + expansions * k**2 >= size - 1]
    return DynamicTree(size, expansions, min(enough[0], size - 1))


def _distinct(
    sizes: Sequence[int], expansions: Sequence[int], top_k: Sequence[int], grows: Callable[[DynamicTree], bool]
) -> list[DynamicTree]:
    """The usable trees of all combinations, each once. Raises `HydrajaxError` where there is none."""
    trees = [usable(*numbers) for numbers in itertools.product(sizes, expansions, top_k)]
    found = [tree for tree in dict.fromkeys(trees) if grows(tree)]
    if not found:
        raise HydrajaxError(f"shapes: no dynamic tree of {min(sizes)} to {max(sizes)} nodes can be grown here")
    return found
