"""Write measurements as they are made, so that a run that is cut short keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_lines(lines: Sequence[dict], out: Path) -> None:
    """Write all lines so far to a temporary file and rename it."""
    temporary = out.with_name(out.name + ".partial")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(out)
