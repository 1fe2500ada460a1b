"""What clients choose by the name of a model: drafts and trees for one base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.measure.benchmark import step_timer
from hydrajax.measure.timing import interleaved_ms
from hydrajax.serve.batcher import Batcher, Stats

CONTEXT, ROUNDS = 256, 5


@dataclass(frozen=True)
class Served:
    """A base with a draft and its trees, in a batcher of its own. about: what the list of models says of it besides."""

    name: str
    batcher: Batcher
    about: Mapping[str, Any] = field(default_factory=dict)


def check_names(names: Sequence[str]) -> None:
    """Raises `HydrajaxError` where clients could not tell two models apart."""
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise HydrajaxError(f"name: two models are called the same, found {twice[0]}")


def together(stats: Sequence[Stats]) -> Stats:
    """The counts of several batchers as if they were one."""
    found = {one.name: sum(getattr(some, one.name) for some in stats) for one in fields(Stats)}
    return Stats(**found | {"failed": any(some.failed for some in stats)})


def close_all(batchers: Sequence[Batcher], grace: float = 0.0) -> bool:
    """`Batcher.close` of all at once; whether none had to break an answer off."""
    with ThreadPoolExecutor(len(batchers)) as pool:  # it waits for all
        return all(pool.map(lambda batcher: batcher.close(grace), batchers))


def plain_step_seconds(executor: Executor) -> float:
    """Measure the seconds of a token without a draft, in one row after `CONTEXT` tokens, or in a shorter context."""
    context = min(CONTEXT, executor.model.config.max_positions)
    return interleaved_ms({"step": step_timer(executor.autoregressive(), 1, context).step()}, ROUNDS)["step"] / 1e3
