"""The choices of a static tree: rank paths, checked and sorted."""

from collections.abc import Iterable, Sequence

import numpy as np

from hydrajax.errors import HydrajaxError

Choice = tuple[int, ...]

# The mask alone takes N * N bytes, and no device verifies thousands of nodes faster than it generates tokens.
MAX_NODES = 4096


def canonical(choices: Iterable[Sequence[int]]) -> tuple[Choice, ...]:
    """Return validated rank paths sorted by (length, lexicographic); `TreeTopology` lists the errors."""
    paths = []
    for choice in choices:
        if not isinstance(choice, (list, tuple)) or not choice:
            raise HydrajaxError(f"tree: got the choice {_cut(choice)}, expected a non-empty list of ranks")
        for rank in choice:
            if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 0:
                raise HydrajaxError(
                    f"tree: got the rank {_cut(rank)} in {_cut(list(choice))}, expected integers from 0 up"
                )
        paths.append(tuple(int(rank) for rank in choice))
        if len(paths) >= MAX_NODES:
            raise HydrajaxError(f"tree: got more than {MAX_NODES} nodes, expected at most {MAX_NODES}, root included")
    known = set(paths)
    if len(known) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise HydrajaxError(f"tree: got the choice {list(twice)} more than once, expected it once")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise HydrajaxError(f"tree: got the choice {list(path)} without its parent: add {list(path[:-1])}")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _cut(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that nests too deeply to be shown"
    return shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
