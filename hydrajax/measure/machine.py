"""The machine that measures: what it is, how fast its memory is, and how much of it has been used."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hydrajax.measure.timing import median_ms
from hydrajax.models.kernels import few_rows


def machine() -> dict[str, Any]:
    """What measured times depend on: the device, its cores, and the versions of JAX, Python and hydrajax.

    ``cpu_kernels``: whether our own were built (`hydrajax.models.kernels`).
    """
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "hydrajax": own_version(),
        "cpu_kernels": few_rows.available(),
    }


def own_version() -> str:
    """The version of hydrajax that is installed."""
    try:
        return version("hydrajax")
    except PackageNotFoundError:  # run from a folder
        return "not installed"


def _processor() -> str:
    """The processor's name; on most systems Python itself knows no more than its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), None) or platform.processor() or platform.machine()


def copy_bandwidth(megabytes: int = 1024) -> float:
    """The device's bandwidth as a large copy reaches it, in bytes per second; bytes read and written both count."""
    source = jnp.arange(megabytes * 2**18, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)  # a plain copy could be elided
    jax.block_until_ready(copy(source))
    return 2 * source.nbytes / (median_ms(lambda: copy(source), 10) / 1e3)


def peak_memory() -> int:
    """The most bytes that have been in use on the accelerator so far, or in this process where a CPU computes."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
