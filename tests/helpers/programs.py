"""Run ``tests/programs`` in separate processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# For programs that import the package `helpers`, as tests do.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}


def command(name: str, *arguments) -> list[str]:
    """Return the command line of ``tests/programs/{name}.py`` with these arguments."""
    return [sys.executable, str(TESTS / "programs" / f"{name}.py"), *map(str, arguments)]
