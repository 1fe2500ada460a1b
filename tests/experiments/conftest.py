"""Make the scripts of ``experiments/`` and ``tools/gpu/`` importable, as they import each other."""

import sys

from helpers.scripts import EXPERIMENTS, TOOLS

sys.path[:0] = [str(EXPERIMENTS), str(TOOLS / "gpu")]
