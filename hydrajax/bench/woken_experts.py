"""How many experts a pass reads: the more tokens it has, the more of them it wakes."""

from collections.abc import Callable
from typing import Any

import jax

from hydrajax.bench.device_memory import nbytes
from hydrajax.models.llama_config import LlamaConfig

KERNELS = ("gate_up", "down")  # the parameters that experts do not share


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
