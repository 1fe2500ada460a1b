"""The prompt in prefill: one chunk per iteration of the batcher, between the steps of others."""

from __future__ import annotations

from hydrajax.decoding.executor import State
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.prefix_cache import CachedPrefix
from hydrajax.serve.requests import RequestHandle
from hydrajax.serve.slot_group import SlotGroup


class PromptPrefill:
    """A prompt of which a part is prefilled.

    Attributes:
        handle: the request.
        group: that the sequence will join.
        cache_len: positions of its KV cache.
        cached: tokens that are copied from a cached prefix.
        programs: that it needs.
        missed: tokens that the draft does not read.
        read: tokens before these.
        prefix: the cached sequence until it is copied.
    """

    def __init__(
        self,
        pool: ExecutorPool,
        handle: RequestHandle,
        group: SlotGroup,
        prefix: CachedPrefix | None,
        shared: int,
        drafted: bool,
    ):
        """Build it; nothing is run yet.

        Args:
            pool: runs the prompt.
            handle: the request.
            group: for it.
            prefix: a cached sequence, or None.
            shared: tokens that the prompt shares with it.
            drafted: the draft reads the prompt, and the end of a cached prefix that it has not read.
        """
        self._pool, self.handle, self.group = pool, handle, group
        length, read = len(handle.request.ids), shared if prefix is None else min(shared, prefix.read)
        drafted = drafted or handle.request.constraint is not None or not pool.can_be_unread(shared, length)
        self.cached = pool.read_from(read, shared) if drafted else shared
        self.programs = pool.prefill_programs(self.cached, length, drafted)
        self.cache_len = pool.prefill_cache_len(self.cached, length)
        self.read, self.missed = (length, 0) if drafted else (read, length - read)
        self._drafted, self._position = drafted, self.cached
        self.prefix, self._state, self._final = prefix, None, None

    def run_chunk(self) -> State | None:
        """Run the next chunk. Return the state after the last one, which can join the group; None before."""
        if self._final is None:
            self._final = self._run_chunk()
        return self._final

    def _run_chunk(self) -> State | None:
        request, pool, ids = self.handle.request, self._pool, self.handle.request.ids
        if self._state is None:
            self._state = self._first_state()
        if len(ids) - self._position > pool.chunk:
            until = self._position + pool.chunk
            chunk, following = ids[self._position : until], int(ids[until])
            self._state, self._position = pool.feed(self._state, chunk, following, self._drafted), until
            return None
        return pool.finish(self._state, ids[self._position :], request.wanted, request.constraint, self._drafted)

    def _first_state(self) -> State:
        """Copy the cached prefix, or start empty."""
        if self.prefix is None:
            return self._pool.empty(self.cache_len)
        state = self._pool.take(self.prefix.state, 0, self.cache_len)
        self.prefix = None  # so that an evicted entry is freed
        return self._pool.rewind(state, self._position, self.handle.request.ids)
