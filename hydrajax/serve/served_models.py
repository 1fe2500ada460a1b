"""The models that clients choose by name: drafts and trees for one base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hydrajax.bench.benchmark import step_timer
from hydrajax.bench.rounds import medians
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.stats import Stats

CONTEXT, ROUNDS = 256, 5
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class ServedModel:
    """A base with a draft and its trees, in its own batcher.

    Attributes:
        name: in requests.
        batcher: runs its sequences.
        about: further fields of ``/v1/models``.
    """

    name: str
    batcher: Batcher
    about: dict[str, Any] = field(default_factory=dict)


def check_unique(names: Sequence[str]) -> None:
    """Raise `HydrajaxError` if two models have the same name."""
    if repeated := [name for index, name in enumerate(names) if name in names[:index]]:
        raise HydrajaxError(f"name: got {repeated[0]} twice, expected different names")


def total(stats: Sequence[Stats]) -> Stats:
    """Add the counts of several batchers."""
    sums = {one.name: sum(getattr(each, one.name) for each in stats) for one in fields(Stats)}
    return Stats(**sums | {"failed": any(each.failed for each in stats)})


def close_all(batchers: Sequence[Batcher], grace: float = 0.0) -> bool:
    """`Batcher.close` all at once; return whether all have finished their requests."""
    with ThreadPoolExecutor(len(batchers)) as threads:
        return all(threads.map(lambda batcher: batcher.close(grace), batchers))


def plain_step_seconds(executor: Executor) -> float:
    """Time a plain step of one sequence after `CONTEXT` tokens, or after the full context if shorter."""
    context = min(CONTEXT, executor.model.config.max_positions)
    return medians({"step": step_timer(executor.autoregressive(), 1, context).step()}, ROUNDS)["step"] / 1e3


def while_idle(
    measure: Callable[[], Measured], batchers: Sequence[Batcher], wait: Callable[[float], bool]
) -> Measured | None:
    """Return what ``measure`` returns while no request runs; None once ``wait(seconds)`` returns False."""
    while wait(1.0):
        before = total([batcher.stats() for batcher in batchers])
        if before.running or before.waiting:
            continue
        found = measure()
        if total([batcher.stats() for batcher in batchers]).requests == before.requests:
            return found
    return None
