"""Tree search by speed, with speeds in closed form."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from helpers.refusals import assert_refused
from hydrajax.bench.contests.contest import Measured
from hydrajax.bench.contests.tree_search import EXPANSIONS, QUICK_ROUNDS, TOP_K, name_of, search, usable
from hydrajax.errors import HydrajaxError
from hydrajax.trees import DynamicTree, presets

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
CHAINS = [presets.chain(size - 1) for size in SIZES]


@dataclass
class KnownRace:
    """Replaces the result of `races`. speed: of a tree. ran: the timed trees and their rounds."""

    speed: Callable
    ran: list = field(default_factory=list)

    def __call__(self, trees, repeats, purpose):
        self.ran.append((purpose, [name_of(tree) for tree in trees], repeats))
        return [
            Measured(name_of(tree), tree.size, 2.0, self.speed(tree), None, None, None, 1.0, True) for tree in trees
        ]


def supported(depth: int):
    """Return whether a drafter with this many heads supports a tree."""

    def grows(tree: DynamicTree) -> bool:
        try:
            tree.check(depth, vocab_size=1000)
        except HydrajaxError:
            return False
        return True

    return grows


def best_at(size: int, expansions: int, top_k: int, gain: float = 2.0):
    """Speeds that decrease on both sides of one tree's numbers, most with N; those of static trees depend on N only."""

    def speed(tree) -> float:
        away = 50 * abs(tree.size - size)
        if not isinstance(tree, DynamicTree):
            return 10_000 - away
        return gain * 10_000 - away - 10 * abs(tree.expansions - expansions) - 3 * abs(tree.top_k - top_k)

    return speed


@pytest.mark.parametrize("chains", [CHAINS, []], ids=["both", "dynamic"])
def test_the_best_numbers_are_found_one_after_the_other(chains):
    for wanted in ((16, 3, 8), (8, 1, 4), (32, 5, 12), (12, 7, 2)):
        race = KnownRace(best_at(*wanted))
        found = search(race, chains, SIZES, supported(10), 5)
        assert found.trees[found.fastest.name] == DynamicTree(*wanted)
        numbers = ("nodes", "expansions", "children")
        purposes = [*(f"choosing the number of {number}" for number in numbers), "measuring"]
        assert [purpose for purpose, *_ in race.ran] == purposes
        assert [rounds for *_, rounds in race.ran] == [QUICK_ROUNDS] * 3 + [5]
        assert [len(rows) for rows in found.tried] == [len(names) for _, names, _ in race.ran[:-1]]
        # All that is tried of D and K.
        assert sum(len(names) for _, names, _ in race.ran[1:3]) <= len(EXPANSIONS) + len(TOP_K)


def test_only_sizes_near_the_fastest_are_tried_unless_they_are_named():
    race = KnownRace(best_at(8, 2, 4))
    names = list(search(race, CHAINS, SIZES, supported(4), 1).trees)
    assert names[: len(SIZES)] == [str(size) for size in SIZES]
    assert [int(name.split("-")[1]) for name in names[len(SIZES) :]] == [4, 6, 8, 12, 16]
    names = list(search(race, CHAINS, SIZES, supported(4), 1, all_sizes=True).trees)
    assert [int(name.split("-")[1]) for name in names[len(SIZES) :]] == SIZES[1:]
    assert {rounds for *_, rounds in race.ran} == {1}  # never more than were asked for
    # The other numbers are chosen at four nodes if small trees are fastest.
    race = KnownRace(best_at(1, 1, 2))
    names = list(search(race, CHAINS, SIZES, supported(4), 1).trees)
    assert race.ran[1][1] == ["dynamic-4-1-3", "dynamic-4-2-3"]
    assert [int(name.split("-")[1]) for name in names[len(SIZES) :]] == [2, 3, 4, 6, 8]


def test_static_trees_only_are_timed_once():
    race = KnownRace(best_at(8, 2, 4))
    found = search(race, CHAINS, SIZES, None, 5)
    assert (found.fastest.name, found.tried) == ("8", [])
    assert race.ran == [("measuring", [str(size) for size in SIZES], 5)]


def test_a_drafter_of_depth_one_has_flat_trees():
    found = search(KnownRace(best_at(6, 0, 5)), [], [4, 6, 8], supported(1), 1)
    assert set(found.trees) == {"dynamic-4-0-3", "dynamic-6-0-5", "dynamic-8-0-7"}
    race = KnownRace(best_at(4, 1, 2))
    message = "shapes: no dynamic tree of 4 to 4 nodes fits this draft"
    assert_refused(search, (race, [], [4], lambda tree: False, 1, message))


def test_usable_trees_can_fill_their_nodes():
    for size, expansions, top_k in itertools.product((2, 3, 5, 13, 64, 100), (0, 1, 3, 9), TOP_K):
        tree = usable(size, expansions, top_k)
        assert tree.size == size
        assert tree.depth == tree.expansions + 1  # as deep as its nodes allow
        assert tree.top_k <= size - 1
        if tree.top_k > top_k:  # it was too few
            assert_refused(DynamicTree, (size, tree.expansions, top_k, "too few"))
        else:
            assert tree.top_k == min(top_k, size - 1)
