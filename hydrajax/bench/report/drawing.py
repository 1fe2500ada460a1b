"""Pictures of trees with matplotlib, an optional dependency."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.optional_deps import needs
from hydrajax.trees.static_tree import TreeTopology

DOTS_PER_INCH = 120
GREEN, GREY, LIGHT = "#1a7f37", "#8c959f", "#d0d7de"


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401 (slow to import, only pictures need it)
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float) -> Any:
    """Return an empty `matplotlib.figure.Figure`; sizes in inches.

    Raises:
        HydrajaxError: matplotlib is not installed.
    """
    if not can_draw():
        raise HydrajaxError(needs("matplotlib"))
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Any) -> bytes:
    """Encode a figure as PNG. Equal figures give equal bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return content.getvalue()


def save_png(figure: Any, path: str | Path, flag: str) -> None:
    """Write a figure as PNG. A failed write leaves no file."""
    with WholeFile(path, flag) as file:
        file.write_bytes(png(figure))


def draw_tree(tree: TreeTopology) -> Any:
    """Draw a tree with the root on top and each node's rank inside it."""
    parents, depths, x = tree.parents, tree.depths, _siblings_apart(tree, lambda below: sum(below) / len(below))
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


def draw_step(tree: TreeTopology, labels: Sequence[str], path: Sequence[int], before: str, note: str) -> Any:
    """Draw the tree of one decode step from left to right, with the accepted path in green.

    Args:
        labels: one text per node.
        path: accepted nodes, the root first.
        before: text up to the root; its end is shown.
    """
    parents, depths = tree.parents, tree.depths
    y = {node: -row for node, row in _siblings_apart(tree, min).items()}  # a node is level with its best child
    lowest = min(y.values())
    column = max(1.5, 0.1 * max(map(len, labels)) + 0.55)  # inches of the widest box and the lines next to it
    figure = new_figure(column * (tree.depth + 2.4), 0.42 * (3.3 - lowest))
    axes = figure.subplots()
    for node in range(tree.size):
        accepted = node in path
        if node:
            (x0, y0), (x1, y1) = (depths[parents[node]], y[parents[node]]), (depths[node], y[node])
            # The accepted path lies above the lines that it shares with others.
            style = {"color": GREEN if accepted else LIGHT, "linewidth": 2.2 if accepted else 1.2}
            axes.plot([x0, x0 + 0.5, x0 + 0.5, x1], [y0, y0, y1, y1], zorder=1 + 0.5 * accepted, **style)
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#dafbe1" if accepted else "white", "linewidth": 1.2}
        box["edgecolor"] = GREEN if accepted else LIGHT
        axes.text(
            depths[node], y[node], labels[node], ha="center", va="center", family="monospace", fontsize=11,
            color="#0b3d1a" if accepted else GREY, bbox=box, zorder=2, parse_math=False,
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


def draw_sizes(rows: Sequence[dict]) -> Any:
    """Draw the tokens per second and per step of the rows of ``hydrajax tree search`` over their nodes."""
    figure = new_figure(5.5, 6.4)
    panels = figure.subplots(2, 1, sharex=True)
    kinds = {
        "static": ([row for row in rows if row["expected_tokens_per_step"] is not None], "o-"),
        "dynamic": ([row for row in rows if row["expected_tokens_per_step"] is None], "^--"),
    }
    for axes, field in zip(panels, ("tokens_per_second", "tokens_per_step"), strict=True):
        for kind, (found, style) in kinds.items():
            points = sorted((row["nodes"], row[field]) for row in found)
            if points:
                axes.plot(*zip(*points, strict=True), style, label=kind)
        axes.set(ylabel=field.replace("_", " "), xscale="log")
    expected = sorted((row["nodes"], row["expected_tokens_per_step"]) for row in kinds["static"][0])
    if expected:
        panels[1].plot(*zip(*expected, strict=True), "k:", label="expected")
    best = max(rows, key=lambda row: row["tokens_per_second"])
    panels[0].plot(best["nodes"], best["tokens_per_second"], "*", markersize=13, label="fastest")
    ticks = [2**n for n in range(max(row["nodes"] for row in rows).bit_length())]
    panels[1].set(xlabel="nodes", xticks=ticks, xticklabels=map(str, ticks))
    panels[1].minorticks_off()
    for axes in panels:
        axes.legend(fontsize=8)
    return figure


def _siblings_apart(tree: TreeTopology, above: Callable[[list[float]], float]) -> dict[int, float]:
    """One coordinate per node: 0, 1, 2 ... for leaves in the order of their paths, ``above(children's)`` for others."""
    inner = set(tree.parents.tolist())
    leaves = [node for node in range(tree.size) if node not in inner]
    order = sorted(leaves, key=lambda node: tree.choices[node - 1] if node else ())
    found = {leaf: float(at) for at, leaf in enumerate(order)}
    for node in reversed(range(tree.size)):
        if node not in found:
            found[node] = above([found[child] for child in tree.children[node] if child > 0])
    return found
