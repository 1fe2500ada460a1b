"""A disk that fills up."""

from __future__ import annotations

import contextlib
import resource


@contextlib.contextmanager
def full_disk(room: int):
    """Limit file sizes to ``room`` bytes: writes fail as on a full disk, with another error code."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
