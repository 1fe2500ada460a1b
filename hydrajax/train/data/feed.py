"""Batches of training sequences, prepared ahead in a thread. The sequences of a batch depend on the step alone."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.train.data.packing import Rows


def batch_indices(n_rows: int, batch_size: int, step: int, seed: int) -> Int[np.ndarray, " batch_size"]:
    """Return the indices of batch ``step`` (from 0), a function of the arguments, so resuming needs no state.

    An epoch is a permutation drawn from seed and epoch; its incomplete last batch is dropped. Raises `HydrajaxError` if
    ``batch_size`` is less than 1 or more than ``n_rows``.
    """
    if not 1 <= batch_size <= n_rows:
        raise HydrajaxError(f"batch_size: got {batch_size}, expected 1 to {n_rows}, the number of training sequences")
    epoch, position = divmod(step, n_rows // batch_size)
    return _epoch_order(n_rows, epoch, seed)[position * batch_size : (position + 1) * batch_size].copy()


@functools.lru_cache(maxsize=4)  # shuffling a million indices takes longer than a batch
def _epoch_order(n_rows: int, epoch: int, seed: int) -> Int[np.ndarray, " n_rows"]:
    return np.random.default_rng((seed, epoch)).permutation(n_rows)


@contextmanager
def feed(
    rows: Rows,
    batch_size: int,
    start: int,
    stop: int,
    *,
    seed: int,
    place: Callable[[dict[str, np.ndarray]], Any] = lambda batch: batch,
    extras: Mapping[str, Any] | None = None,
    depth: int = 2,
) -> Iterator[Iterator[tuple[int, Any]]]:
    """Yield an iterator over ``(step, batch)`` for ``start <= step < stop``.

    Leaving the context, also by an exception, ends the thread after the batch in progress. An error in the thread is
    raised in the consumer after the batches before it.

    Args:
        rows: batches hold its ``tokens``, ``labels`` and, if there are any, ``segments``, int32 ``[batch_size, T]``.
        place: called in the thread with each batch, a dict of NumPy arrays, to put it on the devices. A mesh set by
            `jax.set_mesh` in the caller is not in force there.
        extras: further arrays by name, such as ``np.memmap``, indexed like ``rows``.
    """
    n_rows = len(rows.tokens)
    arrays = {name: array for name, array in rows._asdict().items() if array is not None} | dict(extras or {})
    batch_indices(n_rows, batch_size, start, seed)  # refuses a bad batch size here, not in the thread
    executor, steps = ThreadPoolExecutor(1, thread_name_prefix="feed"), iter(range(start, stop))

    def prepare(step: int) -> Any:
        indices = batch_indices(n_rows, batch_size, step, seed)
        return place({name: np.asarray(array[indices]) for name, array in arrays.items()})

    def submitted(count: int) -> list[tuple[int, Future]]:
        return [(step, executor.submit(prepare, step)) for step in itertools.islice(steps, count)]

    ready = deque(submitted(depth))

    def batches() -> Iterator[tuple[int, Any]]:
        while ready:
            step, future = ready.popleft()
            batch = future.result()
            ready.extend(submitted(1))
            yield step, batch

    try:
        yield batches()
    finally:
        ready.clear()
        executor.shutdown(cancel_futures=True)
