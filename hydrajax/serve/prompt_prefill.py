"""The prompt in prefill: one chunk per iteration of the batcher, between the steps of others."""

from collections import deque

from hydrajax.decoding.executor import State
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.prefix_cache import CachedPrefix
from hydrajax.serve.prompt_chunks import chunks_of
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
        snapshots: of the tokens so far.
        prefix: the cached sequence until it is copied.
    """

    def __init__(
        self,
        pool: ExecutorPool,
        handle: RequestHandle,
        group: SlotGroup,
        prefix: CachedPrefix | None,
        shared: int,
        alike: int,
        drafted: bool,
    ):
        """Build it; nothing is run yet.

        Args:
            pool: runs the prompt.
            handle: the request.
            group: for it.
            prefix: a cached sequence, or None.
            shared: tokens that the prompt shares with it.
            alike: tokens that it shares with any sequence.
            drafted: the draft reads the prompt, and the end of a cached prefix that it has not read.
        """
        self._pool, self.handle, self.group = pool, handle, group
        ids, length = handle.request.ids, len(handle.request.ids)
        known = prefix or CachedPrefix(ids[:0], None, 0, 0, None, pool.no_snapshots)
        start = known.start(shared)
        read = min(start, known.read)
        unread = pool.can_be_unread(start, length, known.snapshots.until(start).stops(start, alike, length))
        drafted = drafted or handle.request.constraint is not None or not unread
        self.cached = known.start(pool.read_from(read, start)) if drafted else start
        self.snapshots = known.snapshots.until(self.cached)
        self._stops = stops = self.snapshots.stops(self.cached, alike, length)
        self.programs = pool.prefill_programs(self.cached, length, drafted, stops)
        self.cache_len = pool.prefill_cache_len(self.cached, length, stops)
        self.read, self.missed = (length, 0) if drafted else (read, length - read)
        self._drafted, self._chunks = drafted, deque(chunks_of(self.cached, length, pool.chunk, stops))
        self.prefix, self._state, self._final = prefix if self.cached else None, None, None

    def run_chunk(self) -> State | None:
        """Run the next chunk. Return the state after the last one, which can join the group; None before."""
        if self._final is None:
            self._final = self._run_chunk()
        return self._final

    def _run_chunk(self) -> State | None:
        request, pool, chunk = self.handle.request, self._pool, self._chunks.popleft()
        if self._state is None:
            self._state = self._first_state()
        if chunk.start in self._stops:
            self.snapshots = self.snapshots.taken(chunk.start, pool.snapshot(self._state))
        ids = request.ids[chunk.start : chunk.until]
        if not self._chunks:
            return pool.finish(self._state, ids, request.wanted, request.constraint, self._drafted)
        if chunk.full:
            self._state = pool.feed(self._state, ids, int(request.ids[chunk.until]), self._drafted)
        else:
            self._state = pool.finish(self._state, ids, pool.neutral, read=self._drafted)
        return None

    def _first_state(self) -> State:
        """Copy the cached prefix, or start empty."""
        if self.prefix is None:
            return self._pool.empty(self.cache_len)
        state = self._pool.shapes.take(self.prefix.state, 0, self.cache_len)
        self.prefix = None  # so that an evicted entry is freed
        return self._pool.rewind(state, self.cached, self.handle.request.ids, self.snapshots.at(self.cached))
