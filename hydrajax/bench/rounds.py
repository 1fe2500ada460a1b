"""Interleaved timing: every round runs all entrants once, so that load on the machine affects all alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import jax

Name, Value = TypeVar("Name", bound=Hashable), TypeVar("Value")


def in_rounds(
    entrants: Mapping[Name, Callable[[int], Value]],
    rounds: int,
    *,
    order: Callable[[int, int], Iterable[int]] = lambda number, count: range(count),
    on_round: Callable[[str], None] = lambda text: None,
) -> dict[Name, list[Value]]:
    """Call every entrant once per round.

    Args:
        entrants: by name; each takes the number of the round and returns what it measured, such as its `seconds`.
        order: from the number of a round and of the entrants to the order in which they run, by index.
    """
    names, found = list(entrants), {name: [] for name in entrants}
    for number in range(rounds):
        on_round(f"round {number + 1} of {rounds}")
        for index in order(number, len(names)):
            found[names[index]].append(entrants[names[index]](number))
    return found


def seconds(call: Callable[..., object], *arguments: Any) -> float:
    """Return the wall time of a call, until the arrays that it returns are ready."""
    began = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - began


def medians(entrants: Mapping[Name, Callable[[int], float]], rounds: int) -> dict[Name, float]:
    """Return the medians of `in_rounds`."""
    return {name: statistics.median(values) for name, values in in_rounds(entrants, rounds).items()}


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of a call in milliseconds."""
    return 1e3 * statistics.median(seconds(call) for _ in range(repeats))
