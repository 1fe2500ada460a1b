"""The tiny base and its drafters, made once for all tests here."""

from __future__ import annotations

import pytest

from helpers.lab import Lab, shared_lab


@pytest.fixture(scope="session")
def lab() -> Lab:
    return shared_lab()
