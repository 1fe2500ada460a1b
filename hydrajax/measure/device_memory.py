"""How fast the device's memory is, and how much of it has been used."""

from __future__ import annotations

import resource

import jax
import jax.numpy as jnp

from hydrajax.measure.timing import median_ms


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
