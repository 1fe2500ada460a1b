"""The scripts of ``experiments/`` and ``tools/``, for their tests."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS, TOOLS = ROOT / "experiments", ROOT / "tools"


def module(path: Path):
    """Import a script; scripts import one another by name, as when they are run."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, found)  # for dataclasses, which look their module up
    spec.loader.exec_module(found)
    return found
