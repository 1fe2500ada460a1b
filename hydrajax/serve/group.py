"""Rows that take their steps together, in one state whose shape follows them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import State
from hydrajax.generation import growing_text
from hydrajax.serve.admission import Use
from hydrajax.serve.pool import Pool
from hydrajax.serve.requests import RequestHandle

TURNS_BEFORE_SHRINKING = 8  # a smaller shape must have been enough for so many


class Running:
    """A row. end: tokens that it can ever come to hold. emitted, steps: so far."""

    def __init__(self, ticket: RequestHandle, tokenizer: Any, end: int):
        self.ticket, self.end = ticket, end
        self.text = growing_text(tokenizer, ticket.request.stop)
        self.emitted, self.steps = 0, 0

    @property
    def held(self) -> int:
        """Tokens in its cache."""
        return len(self.ticket.request.ids) + self.emitted


class Group:
    """One thread changes it. Others may read ``rows``, ``places`` and ``nbytes`` while they hold ``guard``.

    rows: None where a place is free; empty where nothing runs, and then it takes no memory. coming: the end of a row
    whose prompt is being read, for which there will be room. burst: steps to take at a time.
    """

    def __init__(self, pool: Pool, guard: threading.Condition):
        self._pool, self._guard = pool, guard
        self._state: State | None = None
        self.rows: list[Running | None] = []
        self.coming: int | None = None
        self.places, self._too_large, self.burst = 0, 0, 1

    @property
    def live(self) -> list[tuple[int, Running]]:
        """The rows that run, with their places in the group."""
        return [(at, row) for at, row in enumerate(self.rows) if row is not None]

    @property
    def use(self) -> Use:
        """What it takes, and what it can come to take."""
        coming = [] if self.coming is None else [self.coming]
        return Use((*(row.end for _, row in self.live), *coming), self.nbytes)

    @property
    def nbytes(self) -> int:
        """In its present shape, which may still be larger than it must be."""
        return self._pool.shapes.nbytes(len(self.rows), self.places) if self.rows else 0

    def join(self, row: State, running: Running) -> None:
        """Put in the row that was coming. It is copied; the group may grow for it."""
        self.coming = None
        batch, places = self._wanted([*(row for _, row in self.live), running], 1)
        if self._state is None:
            self._state = self._pool.copies(row, batch, places)
            self._set_rows([running] + [None] * (batch - 1), places)
            return
        if batch > len(self.rows) or places > self.places:
            self._reshape(batch, places)
        at = self.rows.index(None)
        self._state = self._pool.put(self._state, at, row, self.places)
        with self._guard:
            self.rows[at] = running

    def advance(self, steps: int, drafted: bool = True) -> Snapshot:
        """At most so many steps of all rows, with their draft or without."""
        self._fit(steps)
        stopped = np.array([row is None for row in self.rows])
        executor = self._pool.executor_for(len(self.rows), drafted)
        self._state, now = executor.advance(self._state, stopped, steps)
        return now

    def remove(self, at: int) -> None:
        with self._guard:
            self.rows[at] = None

    def drop_if_empty(self) -> None:
        if self._state is not None and not any(self.rows):
            self._state = None
            self._set_rows([], 0)

    def copy_of(self, at: int, places: int) -> State:
        """Of one row, in a state of its own."""
        return self._pool.row_of(self._state, at, places)

    def _wanted(self, rows: Sequence[Running], steps: int) -> tuple[int, int]:
        """The smallest batch and cache for these rows and so many steps."""
        grown = steps * self._pool.longest_path
        longest = max(min(row.held + grown, row.end) for row in rows)
        return self._pool.batch_for(len(rows)), self._pool.places_for(longest + self._pool.spare)

    def _fit(self, steps: int) -> None:
        """A larger cache at once where it is needed, a smaller batch or cache when that has been enough for a while."""
        batch, places = self._wanted([row for _, row in self.live], steps)
        if places > self.places:
            self._reshape(batch, places)
        self._too_large = self._too_large + 1 if (batch, places) != (len(self.rows), self.places) else 0
        if self._too_large >= TURNS_BEFORE_SHRINKING:
            self._reshape(batch, places)

    def _reshape(self, batch: int, places: int) -> None:
        """Live rows move to the front; a free one is a copy of the first, which takes no step."""
        live = [at for at, _ in self.live]
        order = live + [live[0] if live else 0] * (batch - len(live))
        self._state = self._pool.reshaped(self._state, order, places)
        self._set_rows([self.rows[at] for at in live] + [None] * (batch - len(live)), places)

    def _set_rows(self, rows: list[Running | None], places: int) -> None:
        with self._guard:
            self.rows, self.places, self._too_large = rows, places, 0
