"""The times of steps and of the draft's prefill, measured while no request runs.

They spare running requests most measurements of the slower kind of steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from hydrajax.decoding.executor import State
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.speculation_policy import IdleTimes

STEPS, ROUNDS = 8, 3
PROMPT = 64  # tokens at most


def idle_times(pool: ExecutorPool) -> IdleTimes:
    """Measure the programs of a short cache. They should be compiled; the first run of each does not count."""
    width = max(width for width in pool.last_chunks if width <= max(PROMPT, pool.last_chunks[0]))
    ids, endless = np.zeros(width, np.int32), pool.spec.replace(eos_ids=())
    cache_len = pool.prefill_cache_len(0, width)
    room = (min(cache_len - pool.headroom, pool.context) - width) // pool.max_path
    steps = max(min(STEPS, room // (ROUNDS + 1)), 1)

    def prefilled(read: bool) -> State:
        return pool.finish(pool.empty(cache_len), ids, pool.key(0, 0), endless, read=read)

    def step_seconds(batch: int, speculative: bool) -> float:
        state = pool.tile(prefilled(True), batch, cache_len)

        def some_steps() -> None:
            nonlocal state
            state, _ = pool.advance(state, cache_len, np.zeros(batch, bool), steps, speculative)

        return _seconds(some_steps) / steps

    found = {(batch, kind): step_seconds(batch, kind) for batch in pool.batches for kind in (True, False)}
    reading = _seconds(lambda: prefilled(True)) - _seconds(lambda: prefilled(False))
    return IdleTimes(found, max(reading, 0.0) / width)


def _seconds(run: Callable[[], object]) -> float:
    """Return the median of `ROUNDS` runs after the first one."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
