"""The tiny base and its drafters, shared by all tests of this directory."""

from __future__ import annotations

import pytest

from helpers.lab import Lab, shared_lab


@pytest.fixture(scope="session")
def lab() -> Lab:
    return shared_lab()
