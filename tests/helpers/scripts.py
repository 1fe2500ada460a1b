"""The scripts of ``experiments/`` and ``tools/``, for their tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS, TOOLS = ROOT / "experiments", ROOT / "tools"


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
