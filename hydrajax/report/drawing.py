"""Pictures with matplotlib, which only they need: figures are objects, nothing global is touched."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.optional_deps import needs
from hydrajax.trees.static_tree import TreeTopology

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


GREEN, GREY, LIGHT = "#1a7f37", "#8c959f", "#d0d7de"


def draw_step(
    tree: TreeTopology,
    labels: Sequence[str],
    path: Sequence[int],
    before: str,
    note: str,
) -> Any:
    """A figure of one step's tree from left to right, the root and then each depth; the accepted path in green.

    labels: of the nodes. path: the nodes that were accepted, the root first. before: the text up to the root, of which
    the end is shown. note: a line below.
    """
    parents, depths = tree.parents, tree.depths
    y = {node: -row for node, row in side_by_side(tree, min).items()}  # a node stands beside its best child
    lowest = min(y.values())
    column = max(1.5, 0.1 * max(map(len, labels)) + 0.55)  # inches that the widest box and the lines beside it take
    figure = new_figure(column * (tree.depth + 2.4), 0.42 * (3.3 - lowest))
    axes = figure.subplots()
    for node in range(tree.size):
        kept = node in path
        if node:
            (x0, y0), (x1, y1) = (depths[parents[node]], y[parents[node]]), (depths[node], y[node])
            # The boxes cover what they hide, and the accepted path what it shares with others.
            line = [x0, x0 + 0.5, x0 + 0.5, x1], [y0, y0, y1, y1]
            axes.plot(*line, color=GREEN if kept else LIGHT, linewidth=2.2 if kept else 1.2, zorder=1 + 0.5 * kept)
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#dafbe1" if kept else "white", "linewidth": 1.2}
        box["edgecolor"] = GREEN if kept else LIGHT
        axes.text(
            depths[node], y[node], labels[node], ha="center", va="center", family="monospace", fontsize=11,
            color="#0b3d1a" if kept else GREY, bbox=box, zorder=2, parse_math=False,
        )  # fmt: skip
    tail = before.splitlines()[-1][-24:] if before else ""
    axes.text(-0.42, y[0], tail, ha="right", va="center", family="monospace", fontsize=10, parse_math=False)
    axes.text(-1.7, lowest - 1.1, note, ha="left", va="top", fontsize=10.5, color=GREEN, parse_math=False)
    titles = ["the base's\nown choice", *(f"guess {k} ahead" for k in range(1, tree.depth + 1))]
    for depth, title in enumerate(titles):
        axes.text(depth, 0.75, title, ha="center", va="bottom", fontsize=9, color="#57606a")
    axes.set(xlim=(-1.75, tree.depth + 0.6), ylim=(lowest - 1.7, 1.6))
    axes.set_axis_off()
    return figure


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
