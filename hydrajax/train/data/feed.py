"""Batches of rows, prepared ahead in a thread so that the device never waits; which rows depends on the step alone."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.train.data.packing import Rows


def batch_indices(n_rows: int, batch_size: int, step: int, seed: int) -> Int[np.ndarray, " batch_size"]:
    """The rows of batch ``step`` (from 0): a function of its arguments alone, so resuming at a step needs no state.

    An epoch visits the rows in an order shuffled by seed and epoch, none twice; its short end is dropped. Raises
    `HydrajaxError` for a batch of less than 1 or of more than all rows.
    """
    if not 1 <= batch_size <= n_rows:
        raise HydrajaxError(f"batch_size: must be from 1 to the {n_rows} rows there are, found {batch_size}")
    epoch, place = divmod(step, n_rows // batch_size)
    return _epoch_order(n_rows, epoch, seed)[place * batch_size : (place + 1) * batch_size].copy()


@functools.lru_cache(maxsize=4)  # a shuffle of a million rows takes longer than a batch
def _epoch_order(n_rows: int, epoch: int, seed: int) -> Int[np.ndarray, " n_rows"]:
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


class Feed:
    """Iterates over ``(step, batch)`` for ``start <= step < stop``, at most ``depth`` batches ahead of the consumer.

    rows:   batches hold its ``tokens``, ``labels`` and, if it has them, ``segments``, each int32 ``[batch_size, T]``.
    extras: further arrays by name, indexed by row as ``rows`` is (``np.memmap`` will do, and is read in the thread).
    place:  called with each batch, a dict of NumPy arrays; what it returns is yielded. It puts them on the devices. It
            runs in the thread, where a mesh set by the caller's `jax.set_mesh` is not in force: close over shardings.

    Use it in a ``with`` statement: leaving it for whatever reason, Ctrl-C too, ends the thread once the batch in hand
    is done. What the thread raises is raised in the consumer, after the batches prepared before it.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        start: int,
        stop: int,
        *,
        seed: int,
        place: Callable[[dict[str, np.ndarray]], Any] = lambda batch: batch,
        extras: Mapping[str, Any] | None = None,
        depth: int = 2,
    ):
        if depth < 1:
            raise HydrajaxError(f"prefetch: must be at least 1, found {depth}")
        arrays = {name: array for name, array in rows._asdict().items() if array is not None}
        for name, array in (extras or {}).items():
            if name in arrays or len(array) != len(rows.tokens):
                raise ValueError(f"extras: {name} has {len(array)} rows or a name in use; there are {len(rows.tokens)}")
            arrays[name] = array
        n_rows = len(rows.tokens)
        batch_indices(n_rows, batch_size, start, seed)  # refuses a bad batch size here and not in the thread
        self._steps = range(start, stop)
        self._indices = lambda step: batch_indices(n_rows, batch_size, step, seed)
        self._arrays, self._place = arrays, place
        self._ready: queue.SimpleQueue = queue.SimpleQueue()  # bounded by the semaphore, so that no put ever blocks
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="feed", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        end: BaseException = StopIteration()
        try:
            for step in self._steps:
                self._room.acquire()
                if self._closed.is_set():
                    break
                indices = self._indices(step)
                batch = {name: np.asarray(array[indices]) for name, array in self._arrays.items()}
                self._ready.put((step, self._place(batch)))
        except BaseException as error:  # the consumer must hear of anything at all, else it would wait for ever
            end = error
        self._ready.put(end)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._room.release()
        return item

    def close(self) -> None:
        """End the thread and let go of the batches not taken. Iteration ends; closing again does nothing."""
        self._closed.set()
        self._room.release()
        self._thread.join()
        while not self._ready.empty():
            self._ready.get()
        self._arrays = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()
