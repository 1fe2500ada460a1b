"""Static candidate trees: from a list of rank paths to the arrays of a decode step. NumPy only.

A tree is written as *choices* (medusa 2.1.2 and the released code): in ``[[0], [0, 0], [1]]`` the root has the
children of rank 0 and 1 (the draft's best and second-best guess), and the first of them has one child.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.trees.choices import Choice, canonical, shortened
from hydrajax.trees.topology import Topology


class Level(NamedTuple):
    """The static gather plan that proposes all nodes of one depth at once.

    Attributes:
        parents: int32 ``[P]`` nodes of the depth above that have children, in node order.
        paths: int32 ``[P, depth]`` the nodes from the root to each parent, both included.
        children: int32 ``[C]`` the nodes proposed at this level, in node order.
        parent_slot: int32 ``[C]`` index into ``parents`` of each child's parent.
        ranks: int32 ``[C]`` each child's rank among its parent's guesses. Ranks, not counts: a tree may skip one.
        width: Widest rank + 1, the k of the level's single top-k.
    """

    parents: np.ndarray
    paths: np.ndarray
    children: np.ndarray
    parent_slot: np.ndarray
    ranks: np.ndarray
    width: int


def check_depth(depth: int, draft_depth: int) -> None:
    """Refuse a tree deeper than the draft proposes."""
    if depth > draft_depth:
        raise HydrajaxError(
            f"tree: got a depth of {depth}, expected at most the {draft_depth} tokens that the draft proposes"
        )


@dataclass(frozen=True, init=False)
class TreeTopology:
    """An immutable, hashable tree; every array is derived from ``choices`` and cached.

    Rank paths are validated and put in canonical order; an empty list is the root alone (no speculation). Node 0 is the
    root, then choices sorted by (length, lexicographic): N = len(choices) + 1 nodes, depth K.

    Attributes:
        estimates: Drafters report how likely each path is (`hydrajax.trees.dynamic.with_estimates`).

    Raises:
        HydrajaxError: For an empty path, a rank that is not a non-negative integer, a duplicate, or a path without its
            prefix.
    """

    choices: tuple[Choice, ...]
    estimates: bool = field(default=False, repr=False)

    def __init__(self, choices: Iterable[Sequence[int]] = (), estimates: bool = False):
        object.__setattr__(self, "choices", canonical(choices))
        object.__setattr__(self, "estimates", estimates)

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> TreeTopology:
        """Return the tree of these choices, like the constructor."""
        return cls(choices)

    @classmethod
    def from_text(cls, text: str) -> TreeTopology:
        """Return the tree of a JSON list of choices, such as ``[[0], [0, 0], [1]]``; raises like `from_choices`."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            allowed = "a JSON list of choices such as [[0], [0, 0], [1]]"
            raise HydrajaxError(f"tree: got '{shortened(text)}', expected {allowed}: {error}") from None
        return cls.from_choices(content)

    @property
    def size(self) -> int:
        """N, the number of nodes, root included."""
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        """K, the longest path; 0 for the root alone."""
        return max((len(path) for path in self.choices), default=0)

    @property
    def max_rank(self) -> int:
        """The largest rank used, -1 for the root alone."""
        return max((max(path) for path in self.choices), default=-1)

    @cached_property
    def _node_of(self) -> dict[Choice, int]:
        return {(): 0} | {path: i + 1 for i, path in enumerate(self.choices)}

    @cached_property
    def parents(self) -> np.ndarray:
        """int32 ``[N]`` parent of each node, -1 for the root."""
        return np.array([-1] + [self._node_of[path[:-1]] for path in self.choices], np.int32)

    @cached_property
    def children(self) -> np.ndarray:
        """int32 ``[N, C]`` children of each node in the order of their ranks, padded with -1."""
        lists = [[] for _ in range(self.size)]
        for node in range(1, self.size):
            lists[self.parents[node]].append(node)
        most = max(map(len, lists))
        return np.array([nodes + [-1] * (most - len(nodes)) for nodes in lists], np.int32).reshape(self.size, most)

    @cached_property
    def depths(self) -> np.ndarray:
        """int32 ``[N]`` depth of each node; its position in the text is sequence length + depth."""
        return np.array([0] + [len(path) for path in self.choices], np.int32)

    @cached_property
    def ancestor_mask(self) -> np.ndarray:
        """bool ``[N, N]``: node i sees node j, that is j is i or an ancestor of i (the tree attention mask)."""
        mask = np.eye(self.size, dtype=bool)
        for node in range(1, self.size):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def node_paths(self) -> np.ndarray:
        """int32 ``[N, K+1]`` nodes from the root down to each node; beyond its depth the node itself, repeated."""
        paths = np.empty((self.size, self.depth + 1), np.int32)
        for node in range(self.size):
            line = [node]
            while line[0] != 0:
                line.insert(0, int(self.parents[line[0]]))
            paths[node] = line + [node] * (self.depth + 1 - len(line))
        return paths

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """One gather plan per depth 1..K."""
        plans = []
        for depth in range(1, self.depth + 1):
            children = np.flatnonzero(self.depths == depth).astype(np.int32)
            parents, slots = np.unique(self.parents[children], return_inverse=True)
            ranks = np.array([self.choices[child - 1][-1] for child in children], np.int32)
            paths = self.node_paths[parents][:, :depth]
            plans.append(Level(parents, paths, children, slots.astype(np.int32), ranks, int(ranks.max()) + 1))
        return tuple(plans)

    @cached_property
    def topology(self) -> Topology:
        """The arrays of the decode step: NumPy constants, the same for all sequences."""
        inner, slots = np.unique(self.parents[1:], return_inverse=True)
        parent_slot = np.concatenate([np.zeros(1, np.int32), slots.astype(np.int32)])
        return Topology(
            self.parents, self.depths, self.ancestor_mask, self.node_paths, self.children, inner, parent_slot
        )

    def check(self, draft_depth: int, vocab_size: int) -> None:
        """Check the tree for a drafter of ``draft_depth`` tokens over ``vocab_size`` tokens; raises `HydrajaxError`."""
        check_depth(self.depth, draft_depth)
        if self.max_rank >= vocab_size:
            raise HydrajaxError(
                f"tree: got rank {self.max_rank}, expected less than the vocabulary of {vocab_size} tokens"
            )
