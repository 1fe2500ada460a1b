"""Requests to the batcher, and the handles to their answers. No device arrays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hydrajax.decoding.constraints import Constraint
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.serve.draft_counts import DraftCounts
from hydrajax.text.answers import Generation


class QueueFull(HydrajaxError):
    """The queue has no room; the client may retry."""


class Closed(HydrajaxError):
    """The batcher is shutting down or has failed."""


@dataclass(frozen=True)
class Submission:
    """One sequence to continue.

    Attributes:
        ids: int32 ``[P]`` prompt tokens.
        wanted: how; without a grammar, whose constraint is compiled.
        constraint: of an empty text, if the request has a grammar; copied for the answer.
        remembered: the answer is added to the draft's corpus, if it has one.
    """

    ids: np.ndarray
    wanted: Request
    constraint: Constraint | None = None
    remembered: bool = True

    def numbered(self, number: int) -> Submission:
        """Return the submission as another of the sequences with the same seed."""
        return replace(self, wanted=self.wanted.replace(number=number))


class RequestHandle:
    """An accepted request and its answer so far. The batcher's thread writes it; any thread may read it.

    Attributes:
        result: the answer so far, None before the first token. Its ``finish_reason`` is None until the end, and stays
            None if the request was cancelled.
        error: why the request failed, or None.
        cached: prompt tokens taken from the prefix cache.
        arrived, first, ended: `time.perf_counter` at submission, first token and end; None if not yet reached.
        started: `time.perf_counter` when its prefill began.
        first_tokens: tokens in the first result.
        gaps: of each later result, the seconds per new token and their number.
        drafts: counts of its speculative steps.
    """

    def __init__(self, request: Submission, on_change: Callable[[], None] | None = None, depth: int = 0):
        """Build the handle of a request that waits.

        Args:
            request: the request.
            on_change: called on the batcher's thread after each new result and at the end.
            depth: of the draft's tree.
        """
        self.request = request
        self.result: Generation | None = None
        self.error: HydrajaxError | None = None
        self.cached = 0
        self.arrived = time.perf_counter()
        self.first: float | None = None
        self.started = self.arrived
        self.first_tokens = 0
        self.gaps: list[tuple[float, int]] = []
        self.drafts = DraftCounts(depth)
        self.ended: float | None = None
        self.cancelled = False
        self._on_change = on_change or (lambda: None)
        self._done = threading.Event()

    @staticmethod
    def without_answer(request: Submission) -> RequestHandle:
        """Return the ended handle of a request for which nothing is generated."""
        found = RequestHandle(request)
        found.result = Generation(request.ids.tolist(), [], "", 0, [], 0, 0.0, "length")
        found.finish()
        return found

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Generation | None:
        """Wait for the end and return the answer; None if cancelled before the first token.

        Raises:
            HydrajaxError: the request's ``error``.
            TimeoutError: after ``timeout`` seconds.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} seconds")
        if self.error is not None:
            raise self.error
        return self.result

    # --- for the batcher --------------------------------------------------------------------------------------

    def update(self, result: Generation) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first, self.first_tokens = now, result.new_tokens
        elif new := result.new_tokens - self.result.new_tokens:
            self.gaps.append(((now - self._latest) / new, new))
        self.result, self._latest = result, now
        self._on_change()

    def finish(self, error: HydrajaxError | None = None) -> None:
        # A parser takes megabytes, and callbacks keep this handle until a late garbage collection.
        self.request = replace(self.request, constraint=None)
        self.error, self.ended = error, time.perf_counter()
        self._done.set()
        self._on_change()
