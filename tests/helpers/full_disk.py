"""A disk that fills up."""

import contextlib
import resource

import pytest

# Orbax's threads may report a failed write to an event loop that it has closed.
MAY_REPORT_LATE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextlib.contextmanager
def full_disk(room: int):
    """Limit file sizes to ``room`` bytes: writes fail as on a full disk, with another error code."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
