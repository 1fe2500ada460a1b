"""Functions timed against each other, whatever library each of them calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def side_by_side(runs: Mapping[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, Any], dict[str, float]]:
    """What each returned, and its median seconds over rounds that run all of them once, in random order.

    Each runs once beforehand, to warm up and to compile.
    """
    outputs = {name: run() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    random = np.random.default_rng(0)
    for _ in range(repeats):
        for name in random.permutation(list(runs)):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    return outputs, {name: statistics.median(times) for name, times in seconds.items()}
