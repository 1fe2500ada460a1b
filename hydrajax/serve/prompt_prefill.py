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
        position: tokens that are done.
    """

    def __init__(
        self, pool: ExecutorPool, handle: RequestHandle, group: SlotGroup, prefix: CachedPrefix | None, shared: int
    ):
        """``prefix``: the cached sequence whose first ``shared`` tokens are the prompt's, or None."""
        self._pool, self.handle, self.group = pool, handle, group
        self.cache_len, self.position = pool.prefill_cache_len(shared, len(handle.request.ids)), shared
        self._prefix, self._state = prefix, None

    def run_chunk(self) -> State | None:
        """Run the next chunk. Return the state after the last one, which can join the group; None before."""
        request, pool = self.handle.request, self._pool
        if self._state is None:
            self._state = self._first_state()
        if len(request.ids) - self.position > pool.chunk:
            until = self.position + pool.chunk
            self._state = pool.feed(self._state, request.ids[self.position : until], int(request.ids[until]))
            self.position = until
            return None
        key = pool.key(request.seed or 0, request.number)
        return pool.finish(self._state, request.ids[self.position :], key, request.spec, request.constraint)

    def _first_state(self) -> State:
        """Copy the cached prefix, or start empty."""
        if self._prefix is None:
            return self._pool.empty(self.cache_len)
        state = self._pool.take(self._prefix.state, 0, self.cache_len)
        self._prefix = None  # so that an evicted entry is freed
        return self._pool.rewind(state, self.position, self.handle.request.ids)
