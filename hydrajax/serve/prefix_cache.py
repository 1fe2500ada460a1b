"""Prompts and answers whose caches are kept, for texts that begin alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hydrajax.decoding.executor import State

SHORTEST = 16  # tokens that are worth a copy of a cache


class CachedPrefix(NamedTuple):
    """ids: int32, the text. state: of one row that has read it. nbytes: of the state."""

    ids: np.ndarray
    state: State
    nbytes: int


class PrefixCache:
    """The last texts, as far as ``limit`` bytes hold them; the one that was of no use for longest goes first."""

    def __init__(self, limit: int):
        self._limit = limit
        self._texts: list[CachedPrefix] = []  # the last used one last

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def best(self, ids: np.ndarray) -> tuple[CachedPrefix, int] | None:
        """The text that a new one has most tokens in common with, and how many; the last of ``ids`` never counts.

        None where they are too few. The caller copies the state before anything else is kept or given up.
        """
        found = [(common(text.ids, ids[:-1]), number) for number, text in enumerate(self._texts)]
        shared, number = max(found, default=(0, -1))
        if shared < SHORTEST:
            return None
        text = self._texts.pop(number)
        self._texts.append(text)
        return text, shared

    def worth(self, ids: np.ndarray, nbytes: int) -> bool:
        """Whether this text would be kept: there is room, and none that is kept begins with it."""
        known = any(common(text.ids, ids) == len(ids) for text in self._texts)
        return len(ids) >= SHORTEST and nbytes <= self._limit and not known

    def add(self, text: CachedPrefix) -> None:
        """Keep a text that is `worth` it. Those that it begins with are no longer needed."""
        self._texts = [old for old in self._texts if common(old.ids, text.ids) < len(old.ids)]
        self._texts.append(text)
        self.shrink(self._limit)

    def shrink(self, limit: int) -> None:
        """So many bytes from now on, which may be more than before."""
        self._limit = limit
        while self._texts and self.nbytes > limit:
            self._texts.pop(0)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts begin alike with."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
