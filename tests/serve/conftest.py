"""One tiny model and its executors for all tests of serving."""

from __future__ import annotations

import pytest

from helpers import letters
from hydrajax.serve.pool import Sizes


@pytest.fixture(scope="session")
def served():
    return letters.model()


@pytest.fixture(scope="session")
def small(served):
    """Two rows, caches of one size: four large programs."""
    pool = letters.pool(served, Sizes(rows=2, chunk=16, places=128))
    pool.warm()
    return pool
