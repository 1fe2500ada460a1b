"""Smaller trees keep the most likely nodes."""

from hydrajax import ops
from hydrajax.drafters.none import NoDrafter
from hydrajax.loaded_model import LoadedModel
from hydrajax.serve.served_models import tree_for
from hydrajax.stored_trees import FastestTree
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, DynamicTree
from hydrajax.trees.smaller import with_size

TREE = "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1],[0,0,0,0]]"


def test_static_trees_keep_the_likeliest_nodes():
    for name, size, choices in (
        (TREE, 2, [[0]]),
        (TREE, 4, [[0], [0, 0], [0, 0, 0]]),
        (TREE, 6, [[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]),
        ("chain-5", 3, [[0], [0, 0]]),
        ("chain-5", 0, [[0]]),
    ):
        assert with_size(presets.by_name(name), size) == presets.tree_of(choices)


def test_large_trees_keep_nodes_of_their_own():
    for name in ("mc_sim_7b_63", "cartesian-4x2x2"):
        whole = presets.by_name(name)
        found = with_size(whole, 10)
        assert found.size == 10
        assert set(found.choices) < set(whole.choices)


def test_dynamic_trees_keep_their_kind():
    assert with_size(BestFirstTree(16), 6) == BestFirstTree(6)
    for size, expansions, top_k in ((60, 7, 10), (8, 5, 3), (9, 2, 4)):
        for smaller in (6, 7):
            found = with_size(DynamicTree(size, expansions, top_k), smaller)
            assert isinstance(found, DynamicTree)
            assert found.size == smaller
    for name, size, expected in (
        ("dynamic-8-5-3", 5, "chain-4"),  # with few nodes it becomes a chain
        ("dynamic-8-2-4", 5, "chain-3"),  # as deep as the tree was
        ("dynamic-60-7-10", 2, "chain-1"),
        ("dynamic-5-1-2", 1, "chain-1"),
    ):
        assert with_size(presets.by_name(name), size) == presets.by_name(expected)


def test_trees_that_are_small_enough_stay():
    for tree in (presets.root(), presets.chain(2), BestFirstTree(3)):
        assert with_size(tree, 3) is tree


class Searched:
    """Stands for a `LanguageModel`. trees: those that were searched, by batch size; measured: on this device."""

    def __init__(self, measured: dict[int, FastestTree] | None = None, **trees: str):
        self._trees = {int(name[1:]): presets.by_name(tree) for name, tree in trees.items()}
        self.measured_tree, self.drafter = (measured or {}).get, NoDrafter()

    default_tree = LoadedModel.default_tree

    def _nearest_tree(self, batch_size: int = 1):
        return self._trees[max(size for size in self._trees if size <= batch_size)]


def test_the_server_cuts_only_trees_that_were_searched_for_one_sequence(monkeypatch):
    monkeypatch.setattr(ops, "step_rows", lambda: 10)
    sizes = [tree_for(Searched(b1="chain-15"), batch).size for batch in (1, 2, 4, 8, 32)]
    assert sizes == [16, 5, 2, 2, 2]
    both = Searched(b1="chain-15", b4="chain-7")
    assert [tree_for(both, batch).size for batch in (1, 2, 4, 8)] == [16, 5, 8, 8]


def test_the_server_prefers_trees_that_were_measured_on_this_device(monkeypatch):
    monkeypatch.setattr(ops, "step_rows", lambda: 10)

    def sizes(**names: str | None) -> list[int]:
        trees = {int(at[1:]): None if name is None else presets.by_name(name) for at, name in names.items()}
        choices = {at: FastestTree(tree, "name", 1.2, "2026-01-01") for at, tree in trees.items()}
        return [tree_for(Searched(choices, b1="chain-15"), batch).size for batch in (1, 2, 4, 8)]

    assert sizes(b1="chain-7") == [8, 5, 2, 2]
    assert sizes(b1="chain-7", b4="chain-3") == [8, 5, 4, 2]
    assert sizes(b1=None) == [16, 5, 2, 2]  # the draft is not faster: the server's own measurements decide
