"""Continuous batching: requests join and leave one running batch, between steps (docs/serving.md)."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hydrajax.decoding.decode_loop import next_burst
from hydrajax.decoding.executor import State
from hydrajax.decoding.keywords import with_keywords
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.generation import growing_text, row_result, seed_for
from hydrajax.serve.admission import Memory
from hydrajax.serve.batch import Batch
from hydrajax.serve.drafting import Drafting
from hydrajax.serve.group import Group, Running
from hydrajax.serve.pool import Pool
from hydrajax.serve.prefix_cache import CachedPrefix
from hydrajax.serve.requests import Closed, QueueFull, Request, RequestHandle


@dataclass(frozen=True)
class Stats:
    """Counts since the beginning (the first nine) and what is there now. Bytes are those of cache memory.

    tokens, steps: of rows, so that their quotient is tau. drafted: of the steps. cached: of ``prompt_tokens``. groups:
    in which rows run, by the length of their texts. rows: of all groups in their shapes. places: of the longest cache.
    nbytes: of the groups in their shapes and of the prompt being read.
    """

    requests: int = 0
    ended: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    waiting: int = 0
    running: int = 0
    groups: int = 0
    rows: int = 0
    places: int = 0
    nbytes: int = 0
    kept_nbytes: int = 0
    kept_texts: int = 0
    limit_nbytes: int = 0
    failed: bool = False


class _Reading:
    """A prompt that is being read, piece by piece, from token ``at`` on. Its row will run in ``group``.

    state: of one row, None before the first piece. places: of its cache. kept: the text whose first ``at`` tokens it
    takes over, if there is one.
    """

    def __init__(self, ticket: RequestHandle, group: Group, places: int, at: int, kept: CachedPrefix | None):
        self.ticket, self.group, self.places, self.at, self.kept = ticket, group, places, at, kept
        self.state: State | None = None


class Batcher:
    """Answers many requests at a time. Methods may be called from any thread; one thread of its own runs the device.

    queue: requests that may wait. cache_memory: bytes for all caches; by default enough for all rows to fill the
    context, and as much again for kept texts. keep: whether texts are kept for those that begin alike.

    Raises `HydrajaxError` for numbers that make no sense, and where the memory is not enough for a single row.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        queue: int = 64,
        cache_memory: int | None = None,
        keep: bool = True,
    ):
        if queue < 0:
            raise HydrajaxError(f"queue: must be at least 0, found {queue}")
        self._executor, self._pool = pool.executor, pool
        self._sizes, self._queue = pool.sizes, queue
        self._memory = Memory(pool, cache_memory, keep=keep)
        # Guards what other threads read. It is never held while the device works: a compilation may take a minute.
        self._changed = threading.Condition()
        self._batch = Batch(pool, self._changed)
        self._drafting = Drafting()
        self._reading: _Reading | None = None
        self._waiting: deque[RequestHandle] = deque()
        self._closing, self._failed, self._finished = False, False, True
        self._counts = dict.fromkeys(
            ("requests", "ended", "cancelled", "refused", "prompt_tokens", "cached", "tokens", "steps", "drafted"), 0
        )
        self._thread = threading.Thread(target=self._run, name="hydrajax batcher", daemon=True)

    # --- for everybody ----------------------------------------------------------------------------------------

    @property
    def alternatives(self) -> int:
        """Of how many tokens, besides its own, every token of an answer has log-probabilities."""
        return self._sizes.logprobs

    def start(self) -> Batcher:
        """Begin to answer."""
        self._thread.start()
        return self

    def request(
        self,
        ids: np.ndarray,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        seed: int | None = None,
        number: int = 0,
        **numbers: Any,
    ) -> Request:
        """Return a request for this model.

        Args:
            ids: token ids of the prompt, int32 ``[P]``.
            max_new_tokens: the limit.
            stop: strings that end the text.
            seed: drawn where the rule samples and none is given.
            number: the prompt's number among those of the seed.
            numbers: of `ExactSampling`, at temperature 0 by default, and of processors; None for their defaults.

        Raises:
            HydrajaxError: for what can never be answered.
        """
        # A limit beyond the context, even one beyond 32 bits, means all that there is.
        spec = self._pool.spec.replace(max_new_tokens=min(max_new_tokens, self._pool.context))
        if len(ids) >= (context := self._pool.context):
            raise HydrajaxError(
                f"prompt: has {len(ids)} tokens, which leaves no room in the model's context of {context}"
            )
        numbers["temperature"] = numbers.get("temperature") or 0.0
        spec = with_keywords(spec, "exact", **numbers)
        if not self._sizes.penalties and any(processor.counts_tokens for processor in spec.processors):
            name = next(name for name, value in numbers.items() if name.endswith("penalty") and value is not None)
            raise HydrajaxError(f"{name}: penalties are not counted here; start with them to have them")
        spec.check(self._executor.model.config)
        seed = None if spec.rule.temperature == 0 else seed_for(spec.rule, seed)
        found = Request(np.asarray(ids, np.int32), spec, seed, number, tuple(stop))
        growing_text(self._executor.tokenizer, found.stop)  # refuses what cannot stop it
        self._memory.check(found)
        return found

    def submit(self, requests: Sequence[Request], on_change: Callable[[], None] | None = None) -> list[RequestHandle]:
        """Take requests, all or none. Raises `QueueFull` where the queue has no room, and `Closed`."""
        tickets = [RequestHandle(request, on_change) for request in requests]
        with self._changed:
            if self._failed:
                raise Closed("the server has failed; its log says why")
            if self._closing:
                raise Closed("the server is shutting down")
            free = self._sizes.rows - len(self._batch.live)
            room = self._queue + max(free - (self._reading is not None), 0) - len(self._waiting)
            if len(tickets) > room:
                self._counts["refused"] += len(tickets)
                raise QueueFull(f"the queue of {self._queue} requests is full; try again later")
            self._counts["requests"] += len(tickets)
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def cancel(self, ticket: RequestHandle) -> None:
        ticket.cancel()
        with self._changed:
            self._changed.notify()

    def stats(self) -> Stats:
        with self._changed:
            batch, reading, kept = self._batch, self._reading, self._memory.kept
            to_read = 0 if reading is None else self._pool.shapes.nbytes(1, reading.places)
            return Stats(
                **self._counts,
                waiting=len(self._waiting),
                running=len(batch.live) + (reading is not None),
                groups=sum(bool(group.rows) for group in batch.groups),
                rows=sum(len(group.rows) for group in batch.groups),
                places=max((group.places for group in batch.groups), default=0),
                nbytes=batch.nbytes + to_read,
                kept_nbytes=kept.nbytes,
                kept_texts=len(kept),
                limit_nbytes=self._memory.limit,
                failed=self._failed,
            )

    def close(self, grace: float = 0.0) -> bool:
        """Take nothing more, finish what was taken within so many seconds, then break off the rest.

        What is broken off keeps what it has of an answer. Returns whether there never was any.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(grace)
        with self._changed:
            for ticket in self._tickets():
                self._finished &= ticket.cancelled  # by its client
                ticket.cancel()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._let_go()
        return self._finished

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._reading or self._batch.live or self._closing):
                        self._changed.wait()
                    if self._closing and not self._tickets():
                        return
                self._turn()
        except Exception as error:  # whatever it is, nobody must wait for ever
            traceback.print_exc(file=sys.stderr)
            with self._changed:
                self._failed = True
                tickets = self._tickets()
                self._batch.clear()
                self._reading = None
                self._waiting.clear()
            for ticket in tickets:
                ticket.end(Closed(f"the server has failed: {one_line(error)}"))

    def _tickets(self) -> list[RequestHandle]:
        """All that are not over."""
        reading = [] if self._reading is None else [self._reading.ticket]
        return [*(row.ticket for _, _, row in self._batch.live), *reading, *self._waiting]

    def _turn(self) -> None:
        self._let_go()
        self._admit()
        self._read()
        self._advance()

    def _let_go(self) -> None:
        """Drop what was cancelled."""
        with self._changed:
            gone = [ticket for ticket in self._waiting if ticket.cancelled]
            for ticket in gone:
                self._waiting.remove(ticket)
            if self._reading is not None and self._reading.ticket.cancelled:
                gone.append(self._reading.ticket)
                self._reading.group.coming = self._reading = None
            for group, at, row in self._batch.live:
                if row.ticket.cancelled:
                    gone.append(row.ticket)
                    group.remove(at)
            self._counts["cancelled"] += len(gone)
        self._batch.drop_empty()
        for ticket in gone:
            ticket.end()

    def _group(self) -> int | None:
        """For the next request that waits, if it can be let in. They come in one after the other: nobody is passed."""
        if self._reading is not None or not self._waiting:
            return None
        return self._memory.group_for(self._batch.uses, self._waiting[0].request)

    def _admit(self) -> None:
        """Begin to read the next prompt."""
        with self._changed:
            if (number := self._group()) is None:
                return
            ticket = self._waiting.popleft()
            request, ticket.began = ticket.request, time.perf_counter()
            group = self._batch.expect(number, self._memory.end_of(request))
            kept, at = self._memory.beginning_of(request, self._batch.nbytes)
            places = self._pool.places_to_read(at, len(request.ids))
            self._reading = _Reading(ticket, group, places, at, kept)
            ticket.cached = at
            self._counts["prompt_tokens"] += len(request.ids)
            self._counts["cached"] += at
            self._memory.leave_room(self._batch.uses, request)

    def _begun(self, reading: _Reading) -> State:
        """From a kept text that begins alike, or from nothing."""
        if (kept := reading.kept) is None:
            return self._pool.empty_row(reading.places)
        row, ids = self._pool.row_of(kept.state, 0, reading.places), reading.ticket.request.ids
        state = self._pool.rewound(row, reading.at, ids)
        reading.kept = None  # it may have been given up
        return state

    def _read(self) -> None:
        """One piece of the prompt that is being read; after the last its row joins the batch."""
        reading = self._reading
        if reading is None:
            return
        request, pool = reading.ticket.request, self._pool
        ids, chunk = request.ids, pool.chunk
        if reading.state is None:
            reading.state = self._begun(reading)
        if len(ids) - reading.at > chunk:
            until = reading.at + chunk
            reading.state = pool.feed(reading.state, ids[reading.at : until], int(ids[until]))
            reading.at = until
            return
        key = pool.key(request.seed or 0, request.number)
        row = pool.end(reading.state, ids[reading.at :], key, request.spec)
        reading.group.join(row, Running(reading.ticket, self._executor.tokenizer, self._memory.end_of(request)))
        with self._changed:
            self._reading = None
        self._keep(ids, reading.places, lambda: row)

    def _advance(self) -> None:
        """Some steps of all rows, and what they have emitted to those who wait for it."""
        with self._changed:
            prompts_wait = self._reading is not None or self._group() is not None
        groups = [group for group in self._batch.groups if group.live]
        # Nobody waits for a prompt to be read, or for the first token, longer than one step of the others.
        whole_bursts = not (prompts_wait or any(row.ticket.result is None for _, _, row in self._batch.live))
        for group in groups:
            asked = time.perf_counter()
            drafted = not self._pool.drops_draft or self._drafting.is_worth_it(len(group.rows))
            now = group.advance(group.burst if whole_bursts else 1, drafted)
            seconds = time.perf_counter() - asked
            # A burst is over early where all rows come to their ends, so the steps are counted that were taken.
            taken = [int(now.steps[at]) - row.steps for at, row in group.live]
            emitted = sum(int(now.lengths[at]) - row.emitted for at, row in group.live)
            self._drafting.saw(len(group.rows), drafted, max(*taken, 1), seconds, max(sum(taken), 1), emitted)
            if whole_bursts:
                group.burst = next_burst(max(*taken, 1), seconds * len(groups))
            with self._changed:
                self._counts["drafted"] += sum(taken) * drafted
            for at, row in group.live:
                self._deliver(group, at, row, now)
        self._batch.drop_empty()

    def _deliver(self, group: Group, at: int, row: Running, now) -> None:
        request, ticket = row.ticket.request, row.ticket
        over = bool(now.done[at])
        emitted, row.steps = now.tokens[at, : now.lengths[at]], int(now.steps[at])
        row.text.grow(emitted.tolist(), final=over)
        row.emitted = len(emitted)
        over |= row.text.stopped
        seconds = time.perf_counter() - ticket.arrived
        result = row_result(self._executor, request.spec, request.ids, now, at, row.text, seconds, request.seed)
        before = ticket.result
        with self._changed:
            self._counts["tokens"] += result.new_tokens - (0 if before is None else before.new_tokens)
            self._counts["steps"] += result.steps - (0 if before is None else before.steps)
        ticket.grow(result if over else replace(result, finish_reason=None))
        if not over:
            return
        group.remove(at)
        with self._changed:
            self._counts["ended"] += 1
        ticket.end()
        ids = np.concatenate([request.ids, emitted])
        places = self._pool.places_for(len(ids) + self._pool.spare)
        self._keep(ids, places, lambda: group.copy_of(at, places))

    def _keep(self, ids: np.ndarray, places: int, copied: Callable[[], State]) -> None:
        """Keep a text's cache for others that begin alike; ``copied`` gives a state of its row alone."""
        reading = None if self._reading is None else self._reading.ticket.request
        self._memory.leave_room(self._batch.uses, reading)
        nbytes = self._pool.shapes.nbytes(1, places)
        if self._memory.kept.worth(ids, nbytes):
            self._memory.kept.add(CachedPrefix(ids, copied(), nbytes))
