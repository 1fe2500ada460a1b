"""Admission control, and the memory that the KV caches of all models of a server share."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from hydrajax.errors import HydrajaxError
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.prefix_cache import CachedPrefix, PrefixCache
from hydrajax.serve.requests import Submission


class GroupUsage(NamedTuple):
    """The memory of a slot group.

    Attributes:
        max_lengths: tokens that each sequence can reach.
        nbytes: bytes of the present shape, which may be larger than needed.
    """

    max_lengths: tuple[int, ...]
    nbytes: int


class CacheMemory:
    """One limit in bytes for the KV caches of all models; the prefix cache has what the sequences leave. Thread-safe.

    Requests of different models are admitted in the order of their arrival if memory is short.

    Attributes:
        limit: in bytes.
        prefix_cache: of all models.
    """

    def __init__(self, pools: Sequence[ExecutorPool], limit: int | None = None, *, prefix_cache: bool = True):
        """Build it.

        Args:
            pools: the executors of each model.
            limit: bytes, by default enough for all slots with the full context, and as much again for prefixes.
            prefix_cache: keep the caches of sequences that have ended.

        Raises:
            HydrajaxError: if the limit is too small for one sequence.
        """
        self.limit = sum(2 * each.nbytes(each.sizes.slots, each.context) for each in pools) if limit is None else limit
        if (least := max(each.nbytes(1, 1) + each.prefill_nbytes(1) for each in pools)) > self.limit:
            raise HydrajaxError(f"cache_memory: got {self.limit} bytes, expected at least {least} for one sequence")
        self._caches_prefixes, self._lock = prefix_cache, threading.Lock()
        self.prefix_cache = PrefixCache(self.limit if prefix_cache else 0)
        self._reserved: dict[object, int] = {}  # by model
        self._waiting: dict[object, float] = {}  # arrival of the request that waits for memory, by model

    def available(self, owner: object, arrived: float = 0.0) -> int:
        """Return the bytes that a model can reserve, 0 while an earlier request of another one waits for memory."""
        with self._lock:
            waits = any(since < arrived for other, since in self._waiting.items() if other is not owner)
            return 0 if waits else self._left(owner)

    def wait(self, owner: object, arrived: float | None) -> None:
        """Note when the request arrived that waits for memory; None if none does."""
        with self._lock:
            self._waiting.pop(owner, None)
            if arrived is not None:
                self._waiting[owner] = arrived

    def reserve(self, owner: object, nbytes: int) -> bool:
        """Reserve bytes for a model in place of those that it has, and evict prefixes; False if they do not fit."""
        with self._lock:
            if (left := self._left(owner) - nbytes) < 0:
                return False
            self._reserved[owner] = nbytes
            self.prefix_cache.shrink(left if self._caches_prefixes else 0)
            return True

    def _left(self, owner: object) -> int:
        return self.limit - sum(nbytes for other, nbytes in self._reserved.items() if other is not owner)


class CacheBudget:
    """The memory of one model: of its slot groups, its prompt in prefill and its prefixes.

    A request is admitted if the shapes that it and all running sequences need at their maximum lengths fit. So no
    sequence is ever preempted. Requests that would not fit alone are refused, so the queue always advances.
    """

    def __init__(self, pool: ExecutorPool, memory: CacheMemory):
        self._pool, self.memory, self.prefix_cache = pool, memory, memory.prefix_cache

    def max_length(self, request: Submission) -> int:
        """Return the tokens that prompt and answer can reach."""
        return min(len(request.ids) + request.wanted.max_new_tokens, self._pool.context)

    def check(self, request: Submission) -> None:
        """Raise `HydrajaxError` for a request that would not fit alone."""
        needed = self._pool.nbytes(1, self.max_length(request)) + self._pool.prefill_nbytes(len(request.ids))
        if needed > self.memory.limit:
            raise HydrajaxError(
                f"max_new_tokens: prompt and answer need {needed} bytes of cache, the server has {self.memory.limit}; "
                "ask for fewer tokens"
            )

    def find_group(self, usages: Sequence[GroupUsage], request: Submission, arrived: float = 0.0) -> int | None:
        """Return the index of the group that the request can join, or None if it must wait.

        The index after the last one is a new group. It costs one more pass through the model per step, and so it is the
        last choice.
        """
        if sum(len(usage.max_lengths) for usage in usages) == self._pool.sizes.slots:
            self.memory.wait(self, None)
            return None
        length, needed, available = self.max_length(request), [], self.memory.available(self, arrived)
        for index in range(len(usages) + 1):
            joined = [*usages, GroupUsage((), 0)]
            joined[index] = GroupUsage((*joined[index].max_lengths, length), joined[index].nbytes)
            needed.append(self._peak(joined, request))
        order = (*sorted(range(len(usages)), key=needed.__getitem__), len(usages))
        found = next((index for index in order if needed[index] <= available), None)
        self.memory.wait(self, arrived if found is None else None)
        return found

    def find_prefix(self, request: Submission, running_nbytes: int) -> tuple[CachedPrefix | None, int]:
        """Return a cached prefix of the prompt and its length, or (None, 0).

        ``running_nbytes``: of all groups in their present shapes. The entry and its copy must fit together.
        """
        entry, shared = self.prefix_cache.lookup(request.ids, self) or (None, 0)
        if entry is None or self._copying(request, running_nbytes, entry) > self.memory.available(self):
            return None, 0
        return entry, shared

    def admit(
        self, usages: Sequence[GroupUsage], request: Submission, running_nbytes: int, prefix: CachedPrefix | None
    ) -> bool:
        """Reserve memory with a request, and for the copy of its prefix; False if another model was faster."""
        return self.reserve(usages, request, least=self._copying(request, running_nbytes, prefix))

    def reserve(
        self, usages: Sequence[GroupUsage], prefilling: Submission | None, *, least: int = 0, more: int = 0
    ) -> bool:
        """Reserve what the sequences can come to need, and leave the rest to the prefix cache."""
        return self.memory.reserve(self, max(self._peak(usages, prefilling), least) + more)

    def has_room(self, usages: Sequence[GroupUsage], length: int) -> bool:
        """Return whether a text of ``length`` tokens can be prefilled now; this may evict cached prefixes."""
        return self.reserve(usages, None, more=self._pool.prefill_nbytes(length))

    def release(self) -> None:
        """Give everything back but the prefixes."""
        self.memory.wait(self, None)
        self.memory.reserve(self, 0)

    def _copying(self, request: Submission, running_nbytes: int, prefix: CachedPrefix | None) -> int:
        """Return the bytes while a prefix is copied."""
        return running_nbytes + self._pool.prefill_nbytes(len(request.ids)) + (0 if prefix is None else prefix.nbytes)

    def _peak(self, usages: Sequence[GroupUsage], prefilling: Submission | None) -> int:
        """Bytes of the groups at their maximum lengths, and of the prompt in prefill."""
        final = [self._pool.nbytes(len(each), max(each)) if each else 0 for each, _ in usages]
        groups = sum(max(usage.nbytes, needed) for usage, needed in zip(usages, final, strict=True))
        return groups + (0 if prefilling is None else self._pool.prefill_nbytes(len(prefilling.ids)))
