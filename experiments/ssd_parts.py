"""Time the parts of a round of the split executor, as input for `ssd_simulator`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ssd_simulator import Times

from hydrajax.ssd.speculator import MISS
from hydrajax.ssd.split_executor import PARTS, SplitExecutor


def part_seconds(executor: SplitExecutor, prompt: np.ndarray, lengths: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Return the median seconds of each of `PARTS`, run one after the other; "answer" is split into "hit" and "miss".

    The first round is left out; parts without a measurement are NaN. Transfers between devices include the host's part.
    """
    key = jax.random.key(seed)
    executor.decode(prompt, lengths, key)  # compiles
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    began = time.perf_counter()

    def watch(name: str, given: Any) -> None:
        nonlocal began
        jax.block_until_ready(given)
        now = time.perf_counter()
        times[name].append(now - began)
        began = now

    _, record = executor.recorded(prompt, lengths, key, watch=watch)
    # Finished sequences count as hits; rounds after the last active sequence have no answer.
    rounds = int((record.numbers > MISS - 1).any(axis=0).sum())
    missed = (record.numbers == MISS).any(axis=0)[:rounds]
    answers = np.array(times.pop("answer")[:rounds])
    found = {name: _median(some[1:rounds]) for name, some in times.items()}
    later = np.arange(rounds) > 0
    return found | {"hit": _median(answers[later & ~missed]), "miss": _median(answers[later & missed])}


def round_seconds(
    executor: SplitExecutor, prompt: np.ndarray, lengths: np.ndarray, repeats: int = 3, seed: int = 0
) -> float:
    """Return the median seconds of a round of the running executor, without prefill and the first round."""
    key, rows = jax.random.key(seed), len(prompt)
    times: list[float] = []
    rounds = 1
    for _ in range(repeats):
        took = {}
        for limit in (1, executor.program.max_new_tokens):
            began = time.perf_counter()
            out = jax.block_until_ready(executor.decode(prompt, lengths, key, np.full(rows, limit, np.int32)))
            took[limit] = time.perf_counter() - began
        rounds = int(np.max(out.steps)) - 1
        times.append((took[executor.program.max_new_tokens] - took[1]) / max(rounds, 1))
    return statistics.median(times)


def times_of(parts: Mapping[int, Mapping[str, float]], total: int) -> Times:
    """Return the simulator's input for rounds with ``total`` outcomes.

    parts: results of `part_seconds` by number of outcomes, 0 included. The time of a draft in turn is that of an answer
    with nothing prepared, less that of an answer on a hit.
    """
    hits = [found["hit"] for found in parts.values() if not math.isnan(found["hit"])]
    own = parts[total]["hit"]
    take = min(hits, default=0.0) if math.isnan(own) else own
    transfer = (parts[total]["hand over"] + parts[total]["tell"]) / 2
    prepare = parts[total]["prepare"] if total else 0.0
    return Times(parts[total]["verify"], max(parts[0]["miss"] - take, 0.0), prepare, transfer, take)


def _median(values: Sequence[float] | np.ndarray) -> float:
    return statistics.median(map(float, values)) if len(values) else float("nan")
