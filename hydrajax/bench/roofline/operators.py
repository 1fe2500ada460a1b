"""Operators of a program: their operations and traffic, and sums of them."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hydrajax.bench.roofline.division import Division


@dataclass(frozen=True)
class Operator:
    """One operator, or ``count`` equal ones.

    Attributes:
        flops, bytes: Floating-point operations and memory traffic of one operator.
        rows: Of the left matrix, per KV head in attention; the device's rate depends on it.
        kind: ``weights`` is a product with a parameter, ``attention`` a product of two activations, ``collective`` an
            exchange between devices, whose bytes are those that a device sends, ``elementwise`` everything else,
            counted as traffic only.
    """

    name: str
    flops: float
    bytes: float
    rows: int
    kind: Literal["weights", "attention", "elementwise", "collective"]
    count: int = 1


def elementwise(name: str, moved: float) -> Operator:
    """Return an operator that moves ``moved`` bytes and whose arithmetic is hidden by that."""
    return Operator(name, 0.0, moved, 1, "elementwise")


def collective(name: str, sent: float) -> Operator:
    """Return an exchange between devices in which each sends ``sent`` bytes."""
    return Operator(name, 0.0, sent, 1, "collective")


def ranking(name: str, rows: int, vocab_size: float) -> Operator:
    """Return an argmax or top-k, which reads the float32 logits once."""
    return elementwise(name, 4 * rows * vocab_size)


def joined_ranking(name: str, best: int, division: Division) -> Operator:
    """Return the exchange of ``best`` logits and ids of each device, which rank their parts of a vocabulary."""
    return collective(f"all-gather {name}", division.all_gather(8 * best * division.model))


def merged(operators: Iterable[Operator]) -> list[Operator]:
    """Return every distinct operator once, with the sum of the counts."""
    counts: Counter[Operator] = Counter()
    for operator in operators:
        counts[replace(operator, count=1)] += operator.count
    return [replace(operator, count=count) for operator, count in counts.items()]


def at_depth(layers: int, operators_at: Callable[[int], Iterable[Operator]]) -> list[Operator]:
    """Extrapolate the operators of ``layers`` equal layers from one and two layers, which are fast to trace."""
    one, two = ({replace(op, count=1): op.count for op in operators_at(n)} for n in (1, 2))
    counts = {op: one.get(op, 0) + (layers - 1) * (count - one.get(op, 0)) for op, count in two.items()}
    return [replace(op, count=count) for op, count in counts.items() if count]


def flops(operators: Iterable[Operator]) -> float:
    return sum(operator.count * operator.flops for operator in operators)
