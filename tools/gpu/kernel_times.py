"""Kernels of a program that runs on this device, by time, from a trace of JAX's profiler."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def trace(run: Callable[[], object]) -> tuple[list[dict[str, Any]], float]:
    """Return the kernels that ``run`` runs, see `kernels`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        return kernels(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def kernels(events: list[dict]) -> tuple[list[dict[str, Any]], float]:
    """Return the kernels by name, longest first, and the device's busy share between the first and the last kernel.

    On a CPU these are the pieces of work of its threads.
    """
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    devices = {pid for pid, name in names.items() if "/device:" in name} or set(names)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"
    }
    # A GPU has streams, and lines that sum them by module and by operation.
    ran = [
        event
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in devices
        and (len(devices) == len(names) or threads.get((event["pid"], event["tid"]), "").startswith("Stream"))
    ]
    total, count = defaultdict(float), defaultdict(int)
    for event in ran:
        total[event["name"]] += event["dur"] / 1e3
        count[event["name"]] += 1
    rows = [{"name": name, "milliseconds": total[name], "count": count[name]} for name in total]
    end = busy = 0.0
    ran.sort(key=lambda event: event["ts"])
    for event in ran:
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    span = end - ran[0]["ts"] if ran else 0.0
    return sorted(rows, key=lambda row: -row["milliseconds"]), busy / span if span else 0.0
