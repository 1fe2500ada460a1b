"""Pictures with matplotlib, which only they need: figures are objects, nothing global is touched."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile

DOTS_PER_INCH = 120


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of so many inches. Raises `HydrajaxError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HydrajaxError("pictures need matplotlib, which is not installed: pip install 'hydrajax[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Any) -> bytes:
    """The figure as PNG."""
    content = io.BytesIO()
    # Without the version of matplotlib in the file: the same figures give the same bytes.
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return content.getvalue()


def save_png(figure: Any, path: str | Path, flag: str) -> None:
    """Write the figure as PNG, whole or not at all."""
    with WholeFile(path, flag) as file:
        file.write_bytes(png(figure))
