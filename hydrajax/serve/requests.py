"""What is asked of the batcher, and what becomes of it. No arrays on a device here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hydrajax.decoding.spec import DecodeSpec
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import Generation


class QueueFull(HydrajaxError):
    """Not now: the queue is full."""


class Closed(HydrajaxError):
    """Nothing more is taken: the batcher is shutting down, or has failed."""


@dataclass(frozen=True)
class Request:
    """One text to continue.

    ids: int32 ``[P]``. spec: its rule (`ExactSampling`, greedy at temperature 0), processors and ``max_new_tokens``.
    seed: for what is drawn, None where the rule is greedy. number: the prompt's number among those of the seed, as in
    `hydrajax.generate`. stop: strings that end the text.
    """

    ids: np.ndarray
    spec: DecodeSpec
    seed: int | None = None
    number: int = 0
    stop: tuple[str, ...] = ()


class RequestHandle:
    """A request that was taken, and its answer as far as it is. Written by the batcher's thread, read by any.

    result: the answer up to now, None before its first token; its ``finish_reason`` is None until it has ended, and
        remains so where it was broken off. cached: how many of the prompt's tokens were kept from before. error: why
        there is no answer. arrived, began, first, ended: when (`time.perf_counter`) it was submitted, its prompt was
        begun, its first tokens were there, ``first_tokens`` of them, and it was over; None for not yet.
    on_change: called, on the batcher's thread, whenever there is more of the answer and when it has ended.
    """

    def __init__(self, request: Request, on_change: Callable[[], None] | None = None):
        self.request = request
        self.result: Generation | None = None
        self.error: HydrajaxError | None = None
        self.cached = 0
        self.arrived = time.perf_counter()
        self.began: float | None = None
        self.first: float | None = None
        self.first_tokens = 0
        self.ended: float | None = None
        self.cancelled = False
        self._on_change = on_change or (lambda: None)
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        """Nobody waits for the answer any more: its row is free before the next step. It stays as far as it is."""
        self.cancelled = True

    def wait(self, timeout: float | None = None) -> Generation | None:
        """The answer when it has ended; None for one that was cancelled before its first token.

        Raises its error, and `TimeoutError` after so many seconds.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} seconds")
        if self.error is not None:
            raise self.error
        return self.result

    # --- for the batcher --------------------------------------------------------------------------------------

    def grow(self, result: Generation) -> None:
        """There is more of the answer."""
        if self.first is None:
            self.first, self.first_tokens = time.perf_counter(), result.new_tokens
        self.result = result
        self._on_change()

    def end(self, error: HydrajaxError | None = None) -> None:
        self.error, self.ended = error, time.perf_counter()
        self._over.set()
        self._on_change()
