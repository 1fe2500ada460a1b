"""Admission control and the memory budget of the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hydrajax.errors import HydrajaxError
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.prefix_cache import CachedPrefix, PrefixCache
from hydrajax.serve.requests import Submission


class GroupUsage(NamedTuple):
    """The memory of a slot group.

    Attributes:
        max_lengths: Tokens that each sequence can reach.
        nbytes: Of the present shape, which may be larger than needed.
    """

    max_lengths: tuple[int, ...]
    nbytes: int


class CacheBudget:
    """One limit in bytes for the slot groups, the prompt in prefill and the prefix cache.

    A request is admitted if the shapes that it and all running sequences need at their maximum lengths fit. So no
    sequence is ever preempted. Requests that would not fit alone are refused, so the queue always advances.
    """

    def __init__(self, pool: ExecutorPool, limit: int | None, *, prefix_cache: bool):
        """``limit`` defaults to all slots with the full context, and as much again for the prefix cache.

        Raises:
            HydrajaxError: if the limit is too small for one sequence.
        """
        self._pool, self._caches_prefixes = pool, prefix_cache
        self.limit = 2 * pool.nbytes(pool.sizes.slots, pool.context) if limit is None else limit
        self.prefix_cache = PrefixCache(self.limit if prefix_cache else 0)
        if (least := self._alone(1, 1)) > self.limit:
            raise HydrajaxError(f"cache_memory: got {self.limit} bytes, expected at least {least} for one sequence")

    def max_length(self, request: Submission) -> int:
        """Return the tokens that prompt and answer can reach."""
        return min(len(request.ids) + request.wanted.max_new_tokens, self._pool.context)

    def check(self, request: Submission) -> None:
        """Raise `HydrajaxError` for a request that would not fit alone."""
        if (needed := self._alone(self.max_length(request), len(request.ids))) > self.limit:
            raise HydrajaxError(
                f"max_new_tokens: prompt and answer need {needed} bytes of cache, the server has {self.limit}; "
                "ask for fewer tokens"
            )

    def find_group(self, usages: Sequence[GroupUsage], request: Submission) -> int | None:
        """Return the index of the group that the request can join, or None if it must wait.

        The index after the last one is a new group. It costs one more pass through the model per step, and so it is the
        last choice.
        """
        if sum(len(usage.max_lengths) for usage in usages) == self._pool.sizes.slots:
            return None
        length, needed = self.max_length(request), []
        for index in range(len(usages) + 1):
            joined = [*usages, GroupUsage((), 0)]
            joined[index] = GroupUsage((*joined[index].max_lengths, length), joined[index].nbytes)
            needed.append(self._peak(joined, request))
        for index in (*sorted(range(len(usages)), key=needed.__getitem__), len(usages)):
            if needed[index] <= self.limit:
                return index
        return None

    def find_prefix(self, request: Submission, running_nbytes: int) -> tuple[CachedPrefix | None, int]:
        """Return a cached prefix of the prompt and its length, or (None, 0).

        ``running_nbytes``: of all groups in their present shapes. The entry and its copy must fit together.
        """
        entry, shared = self.prefix_cache.lookup(request.ids) or (None, 0)
        if entry is not None and (
            running_nbytes + self._pool.prefill_nbytes(len(request.ids)) + entry.nbytes > self.limit
        ):
            return None, 0
        return entry, shared

    def shrink_prefix_cache(self, usages: Sequence[GroupUsage], prefilling: Submission | None) -> None:
        """Leave the prefix cache the memory that running sequences cannot come to need."""
        self.prefix_cache.shrink(max(self.limit - self._peak(usages, prefilling), 0) if self._caches_prefixes else 0)

    def has_room(self, usages: Sequence[GroupUsage], length: int) -> bool:
        """Return whether a text of ``length`` tokens can be prefilled now; this may evict cached prefixes."""
        left = self.limit - self._peak(usages, None) - self._pool.prefill_nbytes(length)
        if left >= 0 and self._caches_prefixes:
            self.prefix_cache.shrink(left)
        return left >= 0

    def _alone(self, max_length: int, prompt_length: int) -> int:
        return self._pool.nbytes(1, max_length) + self._pool.prefill_nbytes(prompt_length)

    def _peak(self, usages: Sequence[GroupUsage], prefilling: Submission | None) -> int:
        """Bytes of the groups at their maximum lengths, and of the prompt in prefill."""
        final = [self._pool.nbytes(len(each), max(each)) if each else 0 for each, _ in usages]
        groups = sum(max(usage.nbytes, needed) for usage, needed in zip(usages, final, strict=True))
        return groups + (0 if prefilling is None else self._pool.prefill_nbytes(len(prefilling.ids)))
