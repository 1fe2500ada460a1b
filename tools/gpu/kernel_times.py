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


def kernels_per_step(run: Callable[[], object], steps: int, most: int) -> dict[str, Any]:
    """Return what the device does in a step of ``run``, a call of ``steps`` steps.

    On a CPU the kernels are the pieces of work of its threads.

    Returns:
        ``kernels``, the ``most`` longest by name, ``kernels_per_step`` and ``kernel_milliseconds`` of all, and
        ``busy_share``, the device's between the first and the last kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        ran = kernels(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    milliseconds, count = defaultdict(float), defaultdict(int)
    for event in ran:
        milliseconds[event["name"]] += event["dur"] / 1e3 / steps
        count[event["name"]] += 1
    longest = sorted(milliseconds, key=milliseconds.get, reverse=True)[:most]
    return {
        "busy_share": busy_share(ran),
        "kernel_milliseconds": sum(milliseconds.values()),
        "kernels_per_step": len(ran) / steps,
        "kernels": [
            {"name": name[:120], "milliseconds": milliseconds[name], "count": count[name] / steps} for name in longest
        ],
    }


def kernels(events: list[dict]) -> list[dict]:
    """Return the events of a trace that are kernels, in order of time."""
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
    return sorted(ran, key=lambda event: event["ts"])


def busy_share(ran: list[dict]) -> float:
    """Return the share of the time between the first and the last kernel in which any kernel ran."""
    end = busy = 0.0
    for event in ran:
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    span = end - ran[0]["ts"] if ran else 0.0
    return busy / span if span else 0.0
