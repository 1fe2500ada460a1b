"""The KV caches of recent sequences, for new prompts that share a prefix with them."""

import threading
from typing import NamedTuple

import numpy as np

from hydrajax.decoding.executor import State
from hydrajax.decoding.prompt_batch import common_length
from hydrajax.decoding.state_snapshots import StateSnapshots

SHORTEST = 16  # shared tokens that are worth copying a cache


class CachedPrefix(NamedTuple):
    """A sequence's tokens, int32, with the decode state of batch size 1 after them and its bytes.

    The draft has read the first ``read`` tokens. ``owner`` is the model. With recurrent layers a prompt continues from
    the sequence's end or from one of its ``snapshots``.
    """

    ids: np.ndarray
    state: State
    nbytes: int
    read: int
    owner: object = None
    snapshots: StateSnapshots = StateSnapshots()

    def start(self, shared: int) -> int:
        """Return the tokens, at most ``shared``, from which a prompt can continue."""
        return self.snapshots.start(shared, len(self.ids))


class PrefixCache:
    """Least recently used cache of at most ``limit`` bytes for all models. Methods are thread-safe."""

    def __init__(self, limit: int):
        self._limit, self._lock = limit, threading.RLock()
        self._entries: list[CachedPrefix] = []  # most recently used last

    def sizes(self, owner: object = None) -> list[int]:
        """Return the bytes of each entry of a model."""
        with self._lock:  # not before `add` has evicted others
            return [entry.nbytes for entry in self._entries if entry.owner is owner]

    def lookup(self, ids: np.ndarray, owner: object = None) -> tuple[CachedPrefix, int] | None:
        """Return the entry that spares most tokens and its common prefix's length; None if that is below `SHORTEST`.

        The last token of ``ids`` never counts, because it must be run. Copy the state before the next `add` or
        `shrink`.
        """
        with self._lock:
            _, shared, index = self._longest(ids, owner)
            if shared < SHORTEST:
                return None
            entry = self._entries.pop(index)
            self._entries.append(entry)
            return entry, shared

    def longest(self, ids: np.ndarray, owner: object = None) -> int:
        """Return the tokens that the entry of `lookup` would spare, or 0."""
        with self._lock:
            return self._longest(ids, owner)[0]

    def _longest(self, ids: np.ndarray, owner: object) -> tuple[int, int, int]:
        """Return the tokens spared, the length of the prefix, and its entry's index; (0, 0, -1) without entries."""
        own = ((index, entry) for index, entry in enumerate(self._entries) if entry.owner is owner)
        shared = ((shared_length(entry.ids, ids[:-1]), index, entry) for index, entry in own)
        return max(((entry.start(length), length, index) for length, index, entry in shared), default=(0, 0, -1))

    def accepts(self, ids: np.ndarray, nbytes: int, owner: object = None) -> bool:
        """Return whether `add` would keep a new entry: it fits and no entry begins with it."""
        with self._lock:
            own = [entry.ids for entry in self._entries if entry.owner is owner]
            covered = any(shared_length(other, ids) == len(ids) for other in own)
            return len(ids) >= SHORTEST and nbytes <= self._limit and not covered

    def add(self, new: CachedPrefix) -> None:
        """Add an entry that the cache `accepts`, in place of those that are its prefixes."""

        def stays(old: CachedPrefix) -> bool:
            return old.owner is not new.owner or shared_length(old.ids, new.ids) < len(old.ids)

        with self._lock:
            self._entries = [*filter(stays, self._entries), new]
            self.shrink(self._limit)

    def shrink(self, limit: int) -> None:
        """Set the limit and evict entries until they fit."""
        with self._lock:
            self._limit = limit
            while self._entries and sum(entry.nbytes for entry in self._entries) > limit:
                self._entries.pop(0)


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix, 0 if shorter than `SHORTEST`. Most pairs differ at that place."""
    if min(len(a), len(b)) < SHORTEST or a[SHORTEST - 1] != b[SHORTEST - 1]:
        return 0
    found = common_length(a, b)
    return found if found >= SHORTEST else 0
