"""The parameters of the tests that a run has selected, so that a shared fixture computes no more."""

from __future__ import annotations

import pytest


def asked_parameters(request: pytest.FixtureRequest, name: str) -> set:
    """Return the values of one parameter in the selected tests of the fixture's file."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params.get(name) for item in items}
