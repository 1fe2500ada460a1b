"""Makes the scripts of ``experiments/`` and ``tools/gpu/`` importable, as they import each other."""

from __future__ import annotations

import sys

from helpers.scripts import EXPERIMENTS

GPU = [EXPERIMENTS / "gpu", EXPERIMENTS.parent / "tools" / "gpu"]
sys.path[:0] = [str(EXPERIMENTS), *(str(folder) for folder in GPU if folder.is_dir())]
