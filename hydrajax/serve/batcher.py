"""Continuous batching: requests join and leave a running batch between steps (docs/serving.md)."""

from __future__ import annotations

import copy
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hydrajax.decoding.executor import Executor, State
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.sequences import remember, row_result
from hydrajax.serve.admission import CacheBudget, CacheMemory
from hydrajax.serve.bursts import Burst, BurstRunner
from hydrajax.serve.draft_counts import DraftCounts
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.new_request import new_request
from hydrajax.serve.prefix_cache import CachedPrefix, shared_length
from hydrajax.serve.prompt_prefill import PromptPrefill
from hydrajax.serve.requests import Closed, QueueFull, RequestHandle, Submission
from hydrajax.serve.slot_group import Extent, RunningBatch, RunningSequence, SlotGroup
from hydrajax.serve.speculation_policy import IdleTimes
from hydrajax.serve.stats import COUNTS, Stats

POLL = 0.02  # seconds between two looks for programs, if all requests wait for some
ASKS_AGAIN = 0.01  # seconds after an answer within which its client asks the next question, if it has one


class Batcher:
    """Answer many requests at a time. Methods are thread-safe; one thread of the batcher's own runs the device."""

    def __init__(
        self,
        pool: ExecutorPool,
        *,
        queue: int = 64,
        cache_memory: int | CacheMemory | None = None,
        prefix_cache: bool = True,
    ):
        """Build the batcher; `start` starts its thread.

        Args:
            pool: the executors of the model.
            queue: requests that may wait.
            cache_memory: bytes for all KV caches; by default enough for all slots with the full context, and as much
                again for the prefix cache. Several batchers can share a `CacheMemory`.
            prefix_cache: reuse the KV caches of shared prefixes; the `CacheMemory` decides if one is given.

        Raises:
            HydrajaxError: for a negative queue, and for too little memory for one sequence.
        """
        if queue < 0:
            raise HydrajaxError(f"queue: got {queue}, expected at least 0")
        self._executor, self._pool, self._queue_limit = pool.executor, pool, queue
        if not isinstance(cache_memory, CacheMemory):
            cache_memory = CacheMemory([pool], cache_memory, prefix_cache=prefix_cache)
        self._budget = CacheBudget(pool, cache_memory)
        # Guards what other threads read. Never held while the device works: a compilation may take a minute.
        self._lock = threading.Condition()
        self._batch = RunningBatch(pool, self._lock)
        self._bursts = BurstRunner(pool)
        self._prefill: PromptPrefill | None = None
        self._asked_until = 0.0  # a client may ask again
        self._queue: deque[RequestHandle] = deque()
        self._closing, self._failed, self._finished = False, False, True
        self._counts, self._drafts = dict.fromkeys(COUNTS, 0), DraftCounts(pool.longest_path() - 1)
        self._thread = threading.Thread(target=self._run, name="hydrajax batcher", daemon=True)

    # --- for any thread ---------------------------------------------------------------------------------------

    @property
    def executor(self) -> Executor:
        """The executor of batch size 1."""
        return self._executor

    @property
    def context(self) -> int:
        """The base's context in tokens."""
        return self._pool.context

    @property
    def top_logprobs(self) -> int:
        """The number of most likely tokens with log-probabilities at each output position."""
        return self._pool.sizes.logprobs

    @property
    def memory(self) -> CacheMemory:
        """The memory of its KV caches, which other batchers may share."""
        return self._budget.memory

    def start(self) -> Batcher:
        self._thread.start()
        return self

    def request(self, ids: np.ndarray, **fields: Any) -> Submission:
        """Return a request for this model; the fields are those of `hydrajax.serve.new_request.new_request`.

        Raises:
            HydrajaxError: for a request that can never be answered.
        """
        found = new_request(self._pool, ids, **fields)
        self._budget.check(found)
        return found

    def submit(
        self, requests: Sequence[Submission], on_change: Callable[[], None] | None = None
    ) -> list[RequestHandle]:
        """Queue requests, all or none.

        Raises:
            HydrajaxError: for more requests than slots and queue have room for.
            QueueFull: if they have no room at present.
            Closed: if the server is shutting down or has failed.
        """
        if len(requests) > (most := self._queue_limit + self._pool.sizes.slots):
            raise HydrajaxError(
                f"n: got {len(requests)} sequences (prompts x n), expected at most {most}, the server's slots and queue"
            )
        handles = [RequestHandle(request, on_change, self._pool.longest_path() - 1) for request in requests]
        with self._lock:
            if self._failed:
                raise Closed("the server has failed; see its log")
            if self._closing:
                raise Closed("the server is shutting down")
            free = self._pool.sizes.slots - len(self._batch.live)
            room = self._queue_limit + max(free - (self._prefill is not None), 0) - len(self._queue)
            if len(handles) > room:
                self._counts["refused"] += len(handles)
                raise QueueFull(f"the queue of {self._queue_limit} requests is full; try again later")
            self._counts["requests"] += len(handles)
            self._queue.extend(handles)
            self._lock.notify()
        return handles

    def expect(self, times: IdleTimes) -> None:
        """Choose between speculative and plain steps by these times until both are measured."""
        self._bursts.policy.idle = times

    def cancel(self, handle: RequestHandle) -> None:
        """Free the request's slot before the next step. Its answer stays as far as it is."""
        handle.cancelled = True
        with self._lock:
            self._lock.notify()

    def stats(self) -> Stats:
        with self._lock:
            batch, prefill = self._batch, self._prefill
            prefill_nbytes = 0 if prefill is None else self._pool.shapes.nbytes(1, prefill.cache_len)
            nbytes = batch.nbytes + prefill_nbytes
            # Read last: prefixes are evicted before a batch grows.
            prefixes = self._budget.prefix_cache.sizes(self._budget)
            return Stats(
                **self._counts,
                waiting=len(self._queue),
                running=len(batch.live) + (prefill is not None),
                groups=sum(bool(group.slots) for group in batch.groups),
                slots=sum(len(group.slots) for group in batch.groups),
                cache_len=max((group.cache_len for group in batch.groups), default=0),
                nbytes=nbytes,
                prefix_cache_nbytes=sum(prefixes),
                prefix_cache_entries=len(prefixes),
                limit_nbytes=self.memory.limit,
                failed=self._failed,
            )

    def draft_counts(self) -> DraftCounts:
        """Return the counts of speculative steps since the start."""
        with self._lock:
            return copy.deepcopy(self._drafts)

    def refuse(self) -> None:
        """Refuse new requests."""
        with self._lock:
            self._closing = True
            self._lock.notify()

    def close(self, grace: float = 0.0) -> bool:
        """Refuse new requests, finish the accepted ones within ``grace`` seconds, then cancel the rest.

        Returns:
            Whether all requests were finished or cancelled by their clients.
        """
        self.refuse()
        if self._thread.ident is not None:
            self._thread.join(grace)
        with self._lock:
            for handle in self._handles():
                self._finished &= handle.cancelled  # by its client
                handle.cancelled = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._drop_cancelled()
        self._pool.programs.close()
        return self._finished

    # --- the batcher's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run compiled programs only, so that the compilation that one request needs does not stop the others."""
        try:
            while True:
                with self._lock:
                    while not (self._queue or self._prefill or self._batch.live or self._closing):
                        self._lock.wait()
                    if self._closing and not self._handles():
                        return
                if not self._iterate():
                    with self._lock:
                        self._lock.wait(POLL)
        except Exception as error:  # of any kind, as no client must wait for ever
            traceback.print_exc(file=sys.stderr)
            with self._lock:
                self._failed = True
                handles = self._handles()
                self._batch.groups = []
                self._prefill = None
                self._queue.clear()
            for handle in handles:
                handle.finish(Closed(f"the server has failed: {one_line(error)}"))
        finally:
            self._budget.release()

    def _handles(self) -> list[RequestHandle]:
        """All unfinished requests."""
        prefill = [] if self._prefill is None else [self._prefill.handle]
        return [*(sequence.handle for _, _, sequence in self._batch.live), *prefill, *self._queue]

    def _iterate(self) -> bool:
        """Return whether any request advanced; the others wait for programs."""
        self._drop_cancelled()
        advanced = any([self._admit(), self._prefill_chunk(), self._decode()])
        self._reserve()
        return advanced

    def _reserve(self) -> None:
        """Reserve memory for the present sequences: other models can have the rest."""
        self._budget.reserve(self._batch.usages, None if self._prefill is None else self._prefill.handle.request)

    def _drop_cancelled(self) -> None:
        stopped = []
        with self._lock:
            dropped = [handle for handle in self._queue if handle.cancelled]
            for handle in dropped:
                self._queue.remove(handle)
            if self._prefill is not None and self._prefill.handle.cancelled:
                dropped.append(self._prefill.handle)
                self._prefill.group.reserved = self._prefill = None
            for group, slot, sequence in self._batch.live:
                if sequence.handle.cancelled:
                    dropped.append(sequence.handle)
                    group.remove(slot)
                    stopped.append((group, slot, sequence))
            self._counts["cancelled"] += len(dropped)
        for handle in dropped:
            handle.finish()
        for each in stopped:  # its client may ask again, such as for another answer
            self._cache_slot(*each)
        self._batch.drop_empty()

    def _next(self) -> PromptPrefill | None:
        """The first prompt that can be prefilled now. It may overtake those that wait for programs."""
        with self._lock:
            if not self._queue:
                self.memory.wait(self._budget, None)
            for handle in self._queue if self._prefill is None else ():
                request, coming = handle.request, len(self._queue)
                if (index := self._budget.find_group(self._batch.usages, request, handle.arrived)) is None:
                    return None
                group = self._batch.group(index)
                prefix, shared = self._budget.find_prefix(request, self._batch.nbytes)
                alike = max([shared, *self._shared_with_running(request.ids)])
                drafted = self._bursts.drafts(group, coming)
                found = PromptPrefill(self._pool, handle, group, prefix, shared, alike, drafted)
                extent = Extent(len(request.ids), self._budget.max_length(request), request.constraint is not None)
                if self._pool.programs.ready([*found.programs, *group.programs_with(extent)]):
                    return found
            return None

    def _admit(self) -> bool:
        if (found := self._next()) is not None and self._share_running(found.handle.request.ids):
            found = self._next()
        if found is None:
            return False
        with self._lock:
            handle, request = found.handle, found.handle.request
            self._batch.reserve(found.group, self._budget.max_length(request))
            if not self._budget.admit(self._batch.usages, request, self._batch.nbytes, found.prefix):
                found.group.reserved = None
                return False
            self._prefill, handle.cached, handle.started = found, found.cached, time.perf_counter()
            self._queue.remove(handle)
            self._counts["prompt_tokens"] += len(request.ids)
            self._counts["cached"] += handle.cached
        return True

    def _share_running(self, ids: np.ndarray) -> bool:
        """Copy a running sequence to the prefix cache if a prompt shares more with it than with any entry."""
        live, shared = self._batch.live, self._shared_with_running(ids)
        spared = [one.snapshots.start(n, one.length) for (_, _, one), n in zip(live, shared, strict=True)]
        if worth := any(spared) and max(spared) > self._budget.prefix_cache.longest(ids, self._budget):
            self._cache_slot(*live[int(np.argmax(spared))])
        return worth

    def _shared_with_running(self, ids: np.ndarray) -> list[int]:
        """Return the tokens that a prompt shares with each running sequence."""
        return [shared_length(sequence.ids, ids[:-1]) for _, _, sequence in self._batch.live]

    def _prefill_chunk(self) -> bool:
        """Run one chunk of the prompt in prefill; after the last one the sequence joins its group."""
        if (prefill := self._prefill) is None:
            return False
        if (state := prefill.run_chunk()) is None:
            return True
        request = prefill.handle.request
        longest = self._budget.max_length(request)
        sequence = RunningSequence(prefill.handle, self._executor.tokenizer, longest, prefill.snapshots)
        if not self._pool.programs.ready(prefill.group.programs_with(sequence.extent)):  # the group has changed
            return False
        sequence.read, sequence.missed = prefill.read, prefill.missed
        copied = prefill.group.join(state, sequence)
        with self._lock:
            self._prefill = None
        if copied:
            self._cache_prefix(sequence, prefill.cache_len, lambda: state)
        return True

    def _decode(self) -> bool:
        """Advance all groups, and update the handles."""
        with self._lock:
            prompts_wait = self._prefill is not None or self._next() is not None
            coming = (self._prefill is not None) + len(self._queue)
        groups = [group for group in self._batch.groups if group.live and group.grow(1)]
        # Single steps while a prompt waits for prefill or a sequence for its first token, or a client may ask again.
        single = prompts_wait or time.perf_counter() < self._asked_until
        single = single or any(sequence.handle.result is None for _, _, sequence in self._batch.live)
        for group in groups:
            if single:
                burst = self._bursts.single_step(group, coming)
            else:
                burst = self._bursts.run(group, len(groups), partial(self._budget.has_room, self._batch.usages))
            with self._lock:
                self._counts["speculative_steps"] += burst.sequence_steps * burst.speculative
            # Clients first: copies for the prefix cache take milliseconds.
            stepped = group.stepping
            ended = [(slot, each) for slot, each in stepped if self._update(group, slot, each, burst)]
            if ended:
                self._asked_until = time.perf_counter() + ASKS_AGAIN
            for slot, sequence in ended:
                self._cache_slot(group, slot, sequence)
        self._batch.drop_empty()
        return bool(groups)

    def _update(self, group: SlotGroup, slot: int, sequence: RunningSequence, burst: Burst) -> bool:
        """Update a request's handle; free its slot and return True at the end."""
        request, handle, snapshot = sequence.handle.request, sequence.handle, burst.snapshot
        done = bool(snapshot.done[slot])
        emitted, first = snapshot.tokens[slot, : snapshot.lengths[slot]], sequence.steps
        sequence.steps = int(snapshot.steps[slot])
        sequence.text.grow(emitted.tolist(), final=done)
        sequence.output = emitted
        done |= sequence.text.stopped
        seconds = time.perf_counter() - handle.arrived
        result = row_result(self._executor, request.wanted, request.ids, snapshot, slot, sequence.text, seconds)
        before = handle.result
        with self._lock:
            self._counts["tokens"] += result.new_tokens - (0 if before is None else before.new_tokens)
            self._counts["steps"] += result.steps - (0 if before is None else before.steps)
            for counts in (self._drafts, handle.drafts) if burst.candidates else ():
                counts.add(burst.candidates, result.emitted_per_step[first:])
        handle.update(result if done else replace(result, finish_reason=None))
        if not done:
            return False
        group.remove(slot)
        with self._lock:
            self._counts["ended"] += 1
        self._bursts.policy.answered(len(request.ids) - handle.cached, result.new_tokens)
        failed = sequence.constraint is not None and sequence.constraint.error
        handle.finish(HydrajaxError(f"grammar: {failed}") if failed else None)
        if request.remembered:
            remember(self._executor, result)
        return True

    def _cache_slot(self, group: SlotGroup, slot: int, sequence: RunningSequence) -> None:
        """Add the sequence of a slot to the prefix cache."""
        cache_len = self._pool.cache_len_for(sequence.length + self._pool.headroom)
        self._cache_prefix(sequence, cache_len, partial(group.copy_of, slot, cache_len))

    def _cache_prefix(self, sequence: RunningSequence, cache_len: int, copied: Callable[[], State]) -> None:
        """Add a sequence to the prefix cache; ``copied`` returns its state of batch size 1."""
        self._reserve()
        ids, nbytes = sequence.ids, self._pool.shapes.nbytes(1, cache_len)
        if self._budget.prefix_cache.accepts(ids, nbytes, self._budget):
            read = sequence.read if sequence.draft_is_behind else len(ids)
            new = CachedPrefix(ids, copied(), nbytes, read, self._budget, sequence.snapshots)
            self._budget.prefix_cache.add(new)
