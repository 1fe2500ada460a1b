"""Run ``tests/programs`` in separate processes, for the selected tests."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# For programs that import the package `helpers`, as tests do.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}


def command(name: str, *arguments) -> list[str]:
    """Return the command line of ``tests/programs/{name}.py`` with these arguments."""
    return [sys.executable, str(TESTS / "programs" / f"{name}.py"), *map(str, arguments)]


def answer(main: Callable) -> None:
    """Run ``main(folder, *arguments)`` with those of the command line; write what it returns to ``answer.json``."""
    import jax

    folder, *arguments = sys.argv[1:]
    found = main(Path(folder), *arguments) | {"devices": jax.device_count()}
    (Path(folder) / "answer.json").write_text(json.dumps(found))


def asked_parameters(request: pytest.FixtureRequest, name: str) -> set:
    """Return the values of one parameter in the selected tests of the fixture's file."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params.get(name) for item in items}
