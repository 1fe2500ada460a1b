"""Makes the scripts of ``experiments/`` importable, as they import each other."""

from __future__ import annotations

import sys

from helpers.scripts import EXPERIMENTS

sys.path[:0] = [str(EXPERIMENTS), str(EXPERIMENTS / "gpu")]
