"""Time functions against each other, for comparisons between libraries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def side_by_side(runs: Mapping[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Run all functions once per round in random order, after a warm-up. Return their results and median seconds."""
    outputs = {name: run() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    random = np.random.default_rng(0)
    for _ in range(repeats):
        for name in random.permutation(list(runs)):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    return outputs, {name: statistics.median(times) for name, times in seconds.items()}
