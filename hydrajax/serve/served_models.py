"""The models that clients choose by name: drafts and trees for one base."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from hydrajax.bench.benchmark import step_timer
from hydrajax.bench.rounds import medians
from hydrajax.decoding.executor import Executor
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes
from hydrajax.serve.options import DEFAULT_NAME, is_plain
from hydrajax.serve.stats import Stats
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.smaller import with_size

CONTEXT, ROUNDS = 256, 5
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class ServedModel:
    """A base with a draft and its trees, in its own batcher.

    Attributes:
        name: in requests.
        batcher: runs its sequences.
        about: further fields of ``/v1/models``.
        root: by which the base was loaded.
        aliases: other names in requests.
    """

    name: str
    batcher: Batcher
    about: dict[str, Any] = field(default_factory=dict)
    root: str = DEFAULT_NAME
    aliases: tuple[str, ...] = ()


def base_names(base: str | None) -> list[str]:
    """Return the names of a base for clients: the one to list, what the user gave, and `DEFAULT_NAME`.

    A directory is listed by its last part, a GGUF file without its suffix, and a repository without its revision.
    """
    if base is None:
        return [DEFAULT_NAME]
    path = os.path.realpath(base)
    listed = os.path.basename(path).removesuffix(".gguf") if os.path.exists(path) else base.partition("@")[0]
    return [name for name in (listed, base, DEFAULT_NAME) if is_plain(name)]


def pool_for(model: LanguageModel, tree: CandidateTree | None, sizes: PoolSizes) -> ExecutorPool:
    """Return the executors of a model; without a given tree they also take plain steps where these are faster."""
    executor = make_executor(model, model.program(tree=tree))
    if tree is not None:
        return ExecutorPool(executor, sizes)
    return ExecutorPool(executor, sizes, partial(tree_for, model), drops_draft=True)


def tree_for(model: LanguageModel, batch_size: int) -> CandidateTree:
    """Return the tree measured by `generate`, searched or default, for this batch size.

    Without one of its own, a larger batch gets the likeliest nodes of the tree for one sequence, at least two: plain
    steps are chosen by measurement here.
    """
    if (tree := _measured(model, batch_size)) is not None:
        return tree
    of_one = _measured(model, 1)
    found = model.default_tree(batch_size, of_one)
    return found if found.size > 1 else with_size(of_one or model.default_tree(), 2)


def _measured(model: LanguageModel, batch_size: int) -> CandidateTree | None:
    """Return the tree that `generate` has found to be the fastest on this device, if any is faster than no draft."""
    choice = model.measured_tree(batch_size)
    return None if choice is None else choice.tree


def total(batchers: Sequence[Batcher]) -> Stats:
    """Add the counts of several batchers, and their limits unless they share one."""
    stats = [batcher.stats() for batcher in batchers]
    sums = {one.name: sum(getattr(each, one.name) for each in stats) for one in fields(Stats)}
    limit = sum({id(batcher.memory): batcher.memory.limit for batcher in batchers}.values())
    return Stats(**sums | {"failed": any(each.failed for each in stats), "limit_nbytes": limit})


def close_all(batchers: Sequence[Batcher], grace: float = 0.0) -> bool:
    """`Batcher.close` all within ``grace`` seconds; return whether all have finished their requests."""
    until = time.monotonic() + grace
    for batcher in batchers:
        batcher.refuse()
    finished = [batcher.close(max(until - time.monotonic(), 0.0)) for batcher in batchers]
    return all(finished)


def plain_step_seconds(executor: Executor) -> float:
    """Time a plain step of one sequence after `CONTEXT` tokens, or after the full context if shorter."""
    context = min(CONTEXT, executor.model.config.max_positions)
    return medians({"step": step_timer(executor.autoregressive(), 1, context).step()}, ROUNDS)["step"] / 1e3


def while_idle(
    measure: Callable[[], Measured], batchers: Sequence[Batcher], wait: Callable[[float], bool]
) -> Measured | None:
    """Return what ``measure`` returns while no request runs; None once ``wait(seconds)`` returns False."""
    while wait(1.0):
        before = total(batchers)
        if before.running or before.waiting:
            continue
        found = measure()
        if total(batchers).requests == before.requests:
            return found
    return None
