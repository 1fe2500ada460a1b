"""What clients choose by the name of a model: drafts and trees for one base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hydrajax.bundle import Bundle
from hydrajax.measure.benchmark import step_timer
from hydrajax.measure.timing import interleaved_ms
from hydrajax.measure.way import Way
from hydrajax.serve.batcher import Batcher, Stats

CONTEXT, ROUNDS = 256, 5


@dataclass(frozen=True)
class Served:
    """A base with a draft and its trees, in a batcher of its own. about: what the list of models says of it besides."""

    name: str
    batcher: Batcher
    about: Mapping[str, Any] = field(default_factory=dict)


def together(stats: Sequence[Stats]) -> Stats:
    """The counts of several batchers as if they were one."""
    first = stats[0]
    for more in stats[1:]:
        first = replace(
            first, **{one.name: getattr(first, one.name) + getattr(more, one.name) for one in fields(Stats)}
        )
    return replace(first, failed=bool(first.failed))


def close_all(batchers: Sequence[Batcher], grace: float = 0.0) -> bool:
    """`Batcher.close` of all at once; whether none had to break an answer off."""
    with ThreadPoolExecutor(len(batchers)) as pool:
        return all(list(pool.map(lambda batcher: batcher.close(grace), batchers)))


def plain_step_seconds(loaded: Bundle) -> float:
    """Measured: what a token takes without a draft, in one row behind `CONTEXT` tokens, or in a shorter context."""
    plain = Way.of(loaded, "plain").autoregressive()
    timer = step_timer(plain, 1, min(CONTEXT, loaded.model.config.max_positions))
    return interleaved_ms({"step": timer.step()}, ROUNDS)["step"] / 1e3
