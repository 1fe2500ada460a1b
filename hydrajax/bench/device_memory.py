"""Bandwidth of the device's memory, bytes of arrays and of the experts that a pass reads, and peak memory use."""

import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hydrajax.bench.rounds import median_ms
from hydrajax.models.llama_config import LlamaConfig

KERNELS = ("gate_up", "down")  # the parameters that experts do not share
COPIES = 8  # in one program: a launch takes a tenth of the time of a gigabyte on a large GPU


def copy_bandwidth(megabytes: int = 1024) -> float:
    """Measure the bandwidth of large copies in bytes per second, bytes read and bytes written together."""

    @partial(jax.jit, donate_argnums=0)
    def copied(x, count):  # a traced count, or XLA could join the passes
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1, x)

    source = jnp.arange(megabytes * 2**18, dtype=jnp.float32)
    size, kept = source.nbytes, [copied(source, COPIES)]

    def run():
        kept[0] = copied(kept[0], COPIES)
        return kept[0]

    return 2 * COPIES * size / (median_ms(run, 10) / 1e3)


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays, or of arrays of these shapes, in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def peak_memory() -> int:
    """Return the peak memory use so far in bytes: of the accelerator, or of this process on a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def woken(count: float, per_token: float, tokens: int) -> float:
    """Return the expected number of experts that ``tokens`` tokens choose, each ``per_token`` of ``count``.

    Each token is assumed to choose without regard to the others, and all experts equally often. The nodes of a tree
    continue one text and resemble each other, and a router has favourites, so this is an upper estimate.
    """
    return count * (1 - (1 - per_token / count) ** tokens)


def asleep(params: Any, config: LlamaConfig, tokens: int, size: Callable[[Any], int] = nbytes) -> int:
    """Return the bytes, or another ``size``, of the experts that a pass over ``tokens`` is expected not to read."""
    unread = 0.0
    for i, kind in enumerate(config.kinds):
        if kind.experts:
            experts = params[f"layers_{i}"]["experts"]
            leaves = jax.tree.leaves([experts[name] for name in KERNELS])
            share = 1 - woken(kind.experts.count, kind.experts.per_token, tokens) / kind.experts.count
            unread += share * sum(map(size, leaves))
    return round(unread)
