"""Continuous batching: requests join and leave one running batch, between steps (docs/serving.md)."""

from __future__ import annotations

import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from hydrajax.bundle import Bundle
from hydrajax.decoding.either import GreedyOrExact
from hydrajax.decoding.loop import next_burst
from hydrajax.decoding.penalties import Seen
from hydrajax.decoding.state import DecodeState
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.generation import SEED_BITS, growing_text, row_result
from hydrajax.serve.kept import Kept, KeptTexts
from hydrajax.serve.programs import Programs
from hydrajax.serve.requests import Closed, Refused, Request, Ticket
from hydrajax.serve.rows import put_row

TURNS_BEFORE_SHRINKING = 8  # a smaller shape must have been enough for so many


@dataclass(frozen=True)
class Stats:
    """Counts since the beginning (the first eight) and what is there now. Bytes are those of cache memory.

    tokens, steps: of rows, so that their quotient is tau. cached: of ``prompt_tokens``. nbytes: of the batch in its
    shape and the prompt being read.
    """

    requests: int = 0
    ended: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    steps: int = 0
    waiting: int = 0
    running: int = 0
    rows: int = 0
    places: int = 0
    nbytes: int = 0
    kept_nbytes: int = 0
    kept_texts: int = 0
    limit_nbytes: int = 0
    failed: bool = False


class _Reading:
    """A prompt that is being read, piece by piece, from token ``at`` on.

    state: of one row, None before the first piece. places: of its cache. kept: the text whose first ``at`` tokens it
    takes over, if there is one.
    """

    def __init__(self, ticket: Ticket, places: int, at: int, kept: Kept | None):
        self.ticket, self.places, self.at, self.kept = ticket, places, at, kept
        self.state: DecodeState | None = None


class _Running:
    """A row of the batch. held: tokens in its cache. end: as many as it can ever come to hold. steps: taken so far."""

    def __init__(self, ticket: Ticket, loaded: Bundle, end: int):
        self.ticket, self.end = ticket, end
        self.text = growing_text(loaded, ticket.request.stop)
        self.held, self.steps = len(ticket.request.ids), 0


class Batcher:
    """Answers many requests at a time. Methods may be called from any thread; one thread of its own runs the device.

    queue: requests that may wait. cache_memory: bytes for all caches; by default enough for all rows to fill the
    context, and as much again for kept texts. keep: whether texts are kept for those that begin alike.

    Raises `HydrajaxError` for numbers that make no sense, and where the memory is not enough for a single row.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        queue: int = 64,
        cache_memory: int | None = None,
        keep: bool = True,
    ):
        if queue < 0:
            raise HydrajaxError(f"queue: must be at least 0, found {queue}")
        self.loaded, self._programs = programs.loaded, programs
        self._sizes, self._queue = programs.sizes, queue
        whole = programs.nbytes(programs.sizes.rows, programs.context)
        self.memory = 2 * whole if cache_memory is None else cache_memory
        self._keeps, self._kept = keep, KeptTexts(self.memory if keep else 0)
        least = self._memory_for([1], 1)
        if least > self.memory:
            raise HydrajaxError(f"cache_memory: must be at least {least} bytes, for one row, found {self.memory}")
        self._state: DecodeState | None = None
        self._rows: list[_Running | None] = []  # of the batch; None where a place is free
        self._places, self._too_large = 0, 0
        self._reading: _Reading | None = None
        self._waiting: deque[Ticket] = deque()
        # Guards what other threads read. It is never held while the device works: a compilation may take a minute.
        self._changed = threading.Condition()
        self._closing, self._failed, self._burst = False, False, 1
        self._counts = dict.fromkeys(
            ("requests", "ended", "cancelled", "refused", "prompt_tokens", "cached", "tokens", "steps"), 0
        )
        self._thread = threading.Thread(target=self._run, name="hydrajax batcher", daemon=True)

    # --- for everybody ----------------------------------------------------------------------------------------

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
        **numbers: float | None,
    ) -> Request:
        """A request for this model; ``numbers`` are those of the rule (`GreedyOrExact`), None for their defaults.

        seed: drawn if the rule samples and none is given. Raises `HydrajaxError` for what can never be answered.
        """
        if max_new_tokens < 1:
            raise HydrajaxError(f"max_new_tokens: must be at least 1, found {max_new_tokens}")
        if len(ids) >= (context := self._programs.context):
            raise HydrajaxError(
                f"prompt: has {len(ids)} tokens, which leaves no room in the model's context of {context}"
            )
        given = {name: value for name, value in numbers.items() if value is not None}
        if not self._sizes.penalties and (unknown := [name for name in given if name.endswith("penalty")]):
            raise HydrajaxError(f"{unknown[0]}: penalties are not counted here; start with them to have them")
        vocab_size = self.loaded.model.config.vocab_size
        rule = GreedyOrExact.in_full(vocab_size, penalties=self._sizes.penalties, **given)
        if rule.temperature == 0:
            seed = None
        elif seed is None:
            seed = secrets.randbits(SEED_BITS)
        found = Request(np.asarray(ids, np.int32), max_new_tokens, rule, seed, number, tuple(stop))
        growing_text(self.loaded, found.stop)  # refuses an empty stop string
        if found.stop and self.loaded.tokenizer is None:
            raise HydrajaxError("stop: the base has no tokenizer, so there is no text to stop")
        if (needed := self._memory_for([self._end_of(found)], len(ids))) > self.memory:
            raise HydrajaxError(
                f"max_new_tokens: prompt and answer would need {needed} bytes of cache, there are {self.memory}"
            )
        return found

    def submit(self, requests: Sequence[Request], on_change: Callable[[], None] | None = None) -> list[Ticket]:
        """Take requests, all or none. Raises `Refused` where the queue has no room, and `Closed`."""
        tickets = [Ticket(request, on_change) for request in requests]
        with self._changed:
            if self._failed:
                raise Closed("the server has failed; its log says why")
            if self._closing:
                raise Closed("the server is shutting down")
            free = sum(row is None for row in self._rows) + self._sizes.rows - len(self._rows)
            room = self._queue + max(free - (self._reading is not None), 0) - len(self._waiting)
            if len(tickets) > room:
                self._counts["refused"] += len(tickets)
                raise Refused(f"the queue of {self._queue} requests is full; try again later")
            self._counts["requests"] += len(tickets)
            self._waiting.extend(tickets)
            self._changed.notify()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()
        with self._changed:
            self._changed.notify()

    def stats(self) -> Stats:
        with self._changed:
            running = sum(row is not None for row in self._rows)
            reading = self._reading
            nbytes = self._held()
            if reading is not None:
                nbytes += self._programs.shapes.nbytes(1, reading.places)
            return Stats(
                **self._counts,
                waiting=len(self._waiting),
                running=running + (reading is not None),
                rows=len(self._rows),
                places=self._places,
                nbytes=nbytes,
                kept_nbytes=self._kept.nbytes,
                kept_texts=len(self._kept),
                limit_nbytes=self.memory,
                failed=self._failed,
            )

    def close(self, grace: float = 0.0) -> None:
        """Take nothing more, finish what was taken within so many seconds, then break off the rest.

        What is broken off keeps what it has of an answer.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(grace)
        with self._changed:
            for ticket in self._tickets():
                ticket.cancel()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._let_go()

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._reading or any(self._rows) or self._closing):
                        self._changed.wait()
                    if self._closing and not self._tickets():
                        return
                self._turn()
        except Exception as error:  # whatever it is, nobody must wait for ever
            traceback.print_exc(file=sys.stderr)
            with self._changed:
                self._failed = True
                tickets = self._tickets()
                self._state, self._rows, self._reading = None, [], None
                self._waiting.clear()
            for ticket in tickets:
                ticket.end(Closed(f"the server has failed: {one_line(error)}"))

    def _tickets(self) -> list[Ticket]:
        """All that are not over."""
        reading = [] if self._reading is None else [self._reading.ticket]
        return [*(row.ticket for row in self._rows if row is not None), *reading, *self._waiting]

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
                self._reading = None
            for at, row in enumerate(self._rows):
                if row is not None and row.ticket.cancelled:
                    gone.append(row.ticket)
                    self._rows[at] = None
            self._counts["cancelled"] += len(gone)
        self._drop_if_empty()
        for ticket in gone:
            ticket.end()

    def _end_of(self, request: Request) -> int:
        """As many tokens as its text can come to have."""
        return min(len(request.ids) + request.max_new_tokens, self._programs.context)

    def _held(self) -> int:
        """Bytes of the batch in its present shape, which may still be larger than it must be."""
        return self._programs.shapes.nbytes(len(self._rows), self._places) if self._rows else 0

    def _memory_for(self, ends: Sequence[int], prompt: int) -> int:
        """Bytes for a batch of rows that end with so many tokens, and to read a prompt of so many beside it."""
        return self._programs.nbytes(len(ends), max(ends)) + self._programs.nbytes_to_read(prompt)

    def _fits(self) -> bool:
        """Whether the next request that waits can be taken in, and will have room to its end."""
        ends = [row.end for row in self._rows if row is not None]
        if self._reading is not None or not self._waiting or len(ends) == self._sizes.rows:
            return False
        request = self._waiting[0].request
        to_read = self._programs.nbytes_to_read(len(request.ids))
        needed = self._memory_for([*ends, self._end_of(request)], len(request.ids))
        return max(needed, self._held() + to_read) <= self.memory

    def _admit(self) -> None:
        """Begin to read the next prompt."""
        with self._changed:
            if not self._fits():
                return
            ticket = self._waiting.popleft()
            ids, ticket.began = ticket.request.ids, time.perf_counter()
            kept, ticket.cached = self._kept.best(ids) or (None, 0)
            self._reading = _Reading(
                ticket, self._programs.places_to_read(ticket.cached, len(ids)), ticket.cached, kept
            )
            self._counts["prompt_tokens"] += len(ids)
            self._counts["cached"] += ticket.cached
            self._leave_room()

    def _leave_room(self) -> None:
        """What is kept may take the memory that is not needed by those that run, up to their ends."""
        ends, prompt, needed = [row.end for row in self._rows if row is not None], 1, self._held()
        if self._reading is not None:
            request = self._reading.ticket.request
            ends, prompt = [*ends, self._end_of(request)], len(request.ids)
        if ends:
            needed = max(self._memory_for(ends, prompt), needed + self._programs.nbytes_to_read(prompt))
        self._kept.shrink(max(self.memory - needed, 0) if self._keeps else 0)

    def _begun(self, reading: _Reading) -> DecodeState:
        """From a kept text that begins alike, or from nothing."""
        if (kept := reading.kept) is None:
            return self._programs.empty_row(reading.places)
        state = self._programs.shapes.moved(kept.state, [0], reading.places)
        if reading.at < len(kept.ids):
            state = self._programs.rewound(state, reading.at)
        if self._sizes.penalties:
            seen = self._seen(reading.ticket.request.ids[: reading.at])
            state = state._replace(output=state.output._replace(seen=seen))
        reading.kept = None  # it may have been given up
        return state

    def _seen(self, ids: np.ndarray) -> Seen:
        """A prompt's tokens, as a penalty wants them."""
        prompt = np.zeros((1, self.loaded.model.config.vocab_size), bool)
        prompt[0, ids] = True
        return Seen(jnp.asarray(prompt), jnp.zeros(prompt.shape, jnp.int32))

    def _read(self) -> None:
        """One piece of the prompt that is being read; after the last its row joins the batch."""
        reading = self._reading
        if reading is None:
            return
        request, programs = reading.ticket.request, self._programs
        ids, chunk = request.ids, programs.chunk
        if reading.state is None:
            reading.state = self._begun(reading)
        if len(ids) - reading.at > chunk:
            until = reading.at + chunk
            reading.state = programs.feed(reading.state, ids[reading.at : until], int(ids[until]))
            reading.at = until
            return
        key = programs.key(request.seed or 0, request.number)
        row = programs.end(reading.state, ids[reading.at :], key, request.rule, request.max_new_tokens)
        self._join(row, _Running(reading.ticket, self.loaded, self._end_of(request)))
        with self._changed:
            self._reading = None
        self._keep(ids, reading.places, lambda places: row)

    def _join(self, row: DecodeState, running: _Running) -> None:
        """Put a row that has read its prompt into the batch, which may grow for it."""
        live = [row for row in self._rows if row is not None]
        batch, places = self._wanted([*live, running], 1)
        if self._state is None:
            self._state = self._programs.shapes.moved(row, [0] * batch, places)
            self._set_rows([running] + [None] * (batch - 1), places)
            return
        if batch > len(self._rows) or places > self._places:
            self._reshape(batch, places)
        at = self._rows.index(None)
        self._state = put_row(self._state, np.int32(at), row)
        with self._changed:
            self._rows[at] = running

    def _wanted(self, rows: Sequence[_Running], steps: int) -> tuple[int, int]:
        """The smallest batch and cache for these rows and so many steps."""
        grown = steps * self._programs.longest_path
        longest = max(min(row.held + grown, row.end) for row in rows)
        return self._programs.batch_for(len(rows)), self._programs.places_for(longest + self._programs.spare)

    def _reshape(self, batch: int, places: int) -> None:
        """Live rows move to the front; a free one is a copy of the first, which takes no step."""
        live = [at for at, row in enumerate(self._rows) if row is not None]
        order = live + [live[0] if live else 0] * (batch - len(live))
        self._state = self._programs.shapes.reshaped(self._state, order, places)
        self._set_rows([self._rows[at] for at in live] + [None] * (batch - len(live)), places)

    def _set_rows(self, rows: list[_Running | None], places: int) -> None:
        with self._changed:
            self._rows, self._places, self._too_large = rows, places, 0

    def _fit(self, steps: int) -> None:
        """A larger cache at once where it is needed, a smaller batch or cache when that has been enough for a while."""
        live = [row for row in self._rows if row is not None]
        batch, places = self._wanted(live, steps)
        if places > self._places:
            self._reshape(batch, places)
        self._too_large = self._too_large + 1 if (batch, places) != (len(self._rows), self._places) else 0
        if self._too_large >= TURNS_BEFORE_SHRINKING:
            self._reshape(batch, places)

    def _advance(self) -> None:
        """Some steps of all rows, and what they have emitted to those who wait for it."""
        if not any(self._rows):
            return
        with self._changed:
            prompts_wait = self._reading is not None or self._fits()
        steps = 1 if prompts_wait else self._burst
        self._fit(steps)
        stopped = np.array([row is None for row in self._rows])
        asked = time.perf_counter()
        bursts = self._programs.bursts[len(self._rows)]
        self._state, now = bursts.advance(self.loaded.params, self._state, stopped, steps)
        if not prompts_wait:
            # A burst is over early where all rows come to their ends, so the steps are counted that were taken.
            taken = max(int(now.steps[at]) - row.steps for at, row in enumerate(self._rows) if row is not None)
            self._burst = next_burst(max(taken, 1), time.perf_counter() - asked)
        for at, row in enumerate(self._rows):
            if row is not None:
                self._deliver(at, row, now)
        self._drop_if_empty()

    def _drop_if_empty(self) -> None:
        """A batch without rows takes no memory."""
        if self._state is not None and not any(self._rows):
            self._state = None
            self._set_rows([], 0)

    def _deliver(self, at: int, row: _Running, now) -> None:
        request, ticket = row.ticket.request, row.ticket
        over = bool(now.done[at])
        emitted, row.steps = now.tokens[at, : now.lengths[at]], int(now.steps[at])
        row.text.grow(emitted.tolist(), final=over)
        row.held = len(request.ids) + len(emitted)
        over |= row.text.stopped
        seconds = time.perf_counter() - ticket.arrived
        limit = request.max_new_tokens
        result = row_result(self.loaded, request.ids, limit, now, at, row.text, seconds, request.seed)
        before = ticket.result
        with self._changed:
            self._counts["tokens"] += result.new_tokens - (0 if before is None else before.new_tokens)
            self._counts["steps"] += result.steps - (0 if before is None else before.steps)
        ticket.grow(result if over else replace(result, finish_reason=None))
        if not over:
            return
        with self._changed:
            self._rows[at] = None
            self._counts["ended"] += 1
        ticket.end()
        ids = np.concatenate([request.ids, emitted])
        places = self._programs.places_for(len(ids) + self._programs.spare)
        self._keep(ids, places, lambda places: self._programs.shapes.moved(self._state, [at], places))

    def _keep(self, ids: np.ndarray, places: int, copied: Callable[[int], DecodeState]) -> None:
        """Keep a text's cache for others that begin alike; ``copied(places)`` is a state of its row alone."""
        self._leave_room()
        nbytes = self._programs.shapes.nbytes(1, places)
        if self._kept.worth(ids, nbytes):
            self._kept.add(Kept(ids, copied(places), nbytes))
