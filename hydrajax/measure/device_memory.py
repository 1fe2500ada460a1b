"""Bandwidth of the device's memory, and peak memory use."""

from __future__ import annotations

import resource

import jax
import jax.numpy as jnp

from hydrajax.measure.timing import median_ms


def copy_bandwidth(megabytes: int = 1024) -> float:
    """Measure the bandwidth of a large copy in bytes per second, bytes read and bytes written together."""
    source = jnp.arange(megabytes * 2**18, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)  # a plain copy could be elided
    jax.block_until_ready(copy(source))
    return 2 * source.nbytes / (median_ms(lambda: copy(source), 10) / 1e3)


def peak_memory() -> int:
    """Return the peak memory use so far in bytes: of the accelerator, or of this process on a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
