"""One tiny model and its programs for all tests of serving."""

from __future__ import annotations

import pytest

from helpers import letters
from hydrajax.serve.programs import Programs, Sizes


@pytest.fixture(scope="session")
def served():
    return letters.model()


@pytest.fixture(scope="session")
def small(served):
    """Two rows, caches of one size: four large programs."""
    programs = Programs(served, Sizes(rows=2, chunk=16, places=128), lambda rows: letters.TREE)
    programs.warm()
    return programs
