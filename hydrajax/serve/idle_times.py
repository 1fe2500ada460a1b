"""The times of steps and of the draft's prefill, measured while no request runs.

They spare running requests most measurements of the slower kind of steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hydrajax.bench import rounds
from hydrajax.decoding.executor import State
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.speculation_policy import IdleTimes

STEPS, ROUNDS = 8, 5
PROMPT = 64  # tokens at most


def idle_times(pool: ExecutorPool) -> IdleTimes:
    """Measure the programs of a short cache. They should be compiled; the first run of each does not count."""
    width = max(width for width in pool.last_chunks if width <= max(PROMPT, pool.last_chunks[0]))
    ids, endless = np.zeros(width, np.int32), pool.neutral.replace(ignore_eos=True)
    cache_len = pool.prefill_cache_len(0, width)
    room = (min(cache_len - pool.headroom, pool.context) - width) // pool.longest_path()
    steps = max(min(STEPS, room // (ROUNDS + 1)), 1)

    def prefilled(read: bool) -> State:
        return pool.finish(pool.empty(cache_len), ids, endless, read=read)

    def stepping(batch: int, speculative: bool) -> Callable[[], Any]:
        state = pool.shapes.tile(prefilled(True), batch, cache_len)

        def some_steps() -> None:
            nonlocal state
            state, _ = pool.advance(state, cache_len, np.zeros(batch, bool), steps, speculative)

        return some_steps

    found = {}
    for batch in pool.batches:
        seconds = _seconds({kind: stepping(batch, kind) for kind in (True, False)})
        found |= {(batch, kind): each / steps for kind, each in seconds.items()}
    prefill = _seconds({read: partial(prefilled, read) for read in (True, False)})
    return IdleTimes(found, max(prefill[True] - prefill[False], 0.0) / width)


def _seconds(runs: dict[bool, Callable[[], Any]]) -> dict[bool, float]:
    """Run all in turns, `ROUNDS` times after the first round, and return the minima: other load only adds time."""
    timed = {name: lambda number, run=run: rounds.seconds(run) for name, run in runs.items()}
    return {name: min(each[1:]) for name, each in rounds.in_rounds(timed, ROUNDS + 1).items()}
