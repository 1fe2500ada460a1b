"""The chunks in which prompts are prefilled."""

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Prompt tokens from ``start`` to ``until``, which are run at once.

    Attributes:
        start, until: The first token, and the one after the last.
        full: It has as many tokens as a chunk may have, and is not the last.
    """

    start: int
    until: int
    full: bool


def chunks_of(start: int, length: int, size: int, stops: Sequence[int] = ()) -> list[Chunk]:
    """Return the chunks of a prompt from token ``start`` on, of ``size`` tokens at most; one ends at each of
    ``stops``.
    """
    found = []
    while start < length:
        until = min(start + size, *(stop for stop in stops if stop > start), length)
        found.append(Chunk(start, until, until - start == size and until < length))
        start = until
    return found
