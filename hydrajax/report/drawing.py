"""Pictures with matplotlib, which only they need: figures are objects, nothing global is touched."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.extras import needs
from hydrajax.files import WholeFile
from hydrajax.trees.tree import TreeTopology

DOTS_PER_INCH = 120


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401 (slow to import, and only pictures need it)
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of so many inches. Raises `HydrajaxError` without matplotlib."""
    if not can_draw():
        raise HydrajaxError(needs("matplotlib"))
    from matplotlib.figure import Figure

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


def side_by_side(tree: TreeTopology, above: Callable[[list[float]], float]) -> dict[int, float]:
    """Where each node stands among those of its depth: leaves at 0, 1, 2 ... in the order of their paths, and every
    other node where ``above`` says, given its children's places.
    """
    inner = set(tree.parents.tolist())
    leaves = [node for node in range(tree.size) if node not in inner]
    order = sorted(leaves, key=lambda node: tree.choices[node - 1] if node else ())
    places = {leaf: float(at) for at, leaf in enumerate(order)}
    for node in reversed(range(tree.size)):
        if node not in places:
            places[node] = above([places[child] for child in tree.children[node] if child > 0])
    return places


def draw_tree(tree: TreeTopology):
    """A figure of a tree: the root on top, ranks in the nodes."""
    parents, depths, x = tree.parents, tree.depths, side_by_side(tree, lambda below: sum(below) / len(below))
    figure = new_figure(max(4, 0.28 * (1 + max(x.values()))), 1 + tree.depth)
    axes = figure.subplots()
    for node in range(1, tree.size):
        axes.plot([x[parents[node]], x[node]], [-depths[parents[node]], -depths[node]], color="0.6", linewidth=1)
    axes.scatter([x[node] for node in range(tree.size)], -depths, s=140, color="white", edgecolor="C0", zorder=2)
    for node in range(tree.size):
        rank = str(tree.choices[node - 1][-1]) if node else "·"
        axes.text(x[node], -depths[node], rank, ha="center", va="center", fontsize=7, zorder=3)
    axes.set_axis_off()
    return figure
