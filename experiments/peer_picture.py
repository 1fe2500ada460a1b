"""Tables and pictures of what cpu_peers.py measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydrajax.report.drawing import GREEN, GREY, LIGHT, new_figure

DARK = "#57606a"
PLAIN = "hydrajax, autoregressive"
LIGHT_GREEN = "#8fd19e"


def speed_table(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """Return the columns and cells of decoders."""
    columns = ("decoder", "tokens per second", "relative to hydrajax", "same ids", "as")
    return columns, [
        (
            row["name"],
            digits(row["tokens_per_second"]),
            row["ratio"],
            f"{row['same']} of {row['prompts']}",
            row["same_as"],
        )
        for row in rows
    ]


def rows_table(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """Return the columns and cells of forward passes."""
    sizes = sizes_of(rows)
    columns = (
        "program",
        *(f"{rows_text(size)}, ms" for size in sizes),
        f"{rows_text(sizes[-1])} / {rows_text(sizes[0])}",
    )
    found = []
    for row in rows:
        times = [row["ms"][str(size)] for size in sizes]
        share = None if None in (times[0], times[-1]) else times[-1] / times[0]
        found.append((row["name"], *map(digits, times), share))
    return columns, found


def digits(value: float | None) -> str | None:
    """Format a number with three significant digits, or all before the point."""
    return value if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sizes_of(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted(map(int, rows[0]["ms"]))


def rows_text(size: int) -> str:
    return "1 row" if size == 1 else f"{size} rows"


def speed_picture(content: Mapping[str, Any]) -> Any:
    """Draw the speeds of decoders in one run, relative to hydrajax in float32 without a draft."""
    rows = content["results"]
    names = [row["name"].replace("autoregressive", "no draft").replace("greedy", "no draft") for row in rows]
    names = [re.sub("^(llama.cpp|OpenVINO),", r"\1 Q4_1,", name) for name in names]  # results of 2026 name no type
    plain = next(row["tokens_per_second"] for row in rows if row["name"] == PLAIN)
    speeds = [row["tokens_per_second"] / plain for row in rows]
    colours = [GREEN if "hydrajax" in name else GREY for name in names]
    colours = [DARK if name == "hydrajax, no draft" else colour for name, colour in zip(names, colours, strict=True)]
    figure = new_figure(8.6, 0.9 + 0.23 * len(rows))
    axes = figure.subplots()
    axes.barh(range(len(rows)), speeds, color=colours)
    for at, speed in enumerate(speeds):
        axes.text(speed + max(speeds) / 150, at, f"{speed:.2f}x", va="center", fontsize=9)
    _finish(axes, names)
    asked_of = f"{rows[0]['prompts']} {'questions of MT-Bench' if content['arguments']['questions'] else 'prompts'}"
    axes.set_xlabel(f"speed relative to hydrajax without a draft, {asked_of}", fontsize=9)
    axes.set_title(title_of(content), fontsize=10, loc="left")
    return figure


def rows_picture(content: Mapping[str, Any]) -> Any:
    """Draw the milliseconds of forward passes: a bar for each number of rows."""
    rows = content["results"]
    sizes = sizes_of(rows)
    figure = new_figure(8.6, 1.2 + 0.22 * len(rows) * len(sizes))
    axes = figure.subplots()
    height, most = 0.8 / len(sizes), max(ms for row in rows for ms in row["ms"].values() if ms)
    for i, size in enumerate(sizes):
        for at, row in enumerate(rows):
            if (ms := row["ms"][str(size)]) is None:
                continue
            ours = "hydrajax" in row["name"]
            colour = (LIGHT_GREEN if ours else LIGHT) if i else (GREEN if ours else GREY)
            y = at + (i - (len(sizes) - 1) / 2) * height
            axes.barh(y, ms, height, color=colour)
            axes.text(ms + most / 150, y, digits(ms), va="center", fontsize=8)
    _finish(axes, [row["name"] for row in rows])
    texts = " and ".join(rows_text(size) for size in sizes)
    axes.set_xlabel(
        f"ms of a forward pass over {texts} (lighter) at context {content['arguments']['context']}", fontsize=9
    )
    axes.set_title(title_of(content), fontsize=10, loc="left")
    return figure


def title_of(content: Mapping[str, Any]) -> str:
    here, asked = content["machine"], content["arguments"]
    base = asked.get("model") or asked["base"] or "shipped"
    cores = asked["threads"] or here["cores"]
    return f"{base}, float32 unless named, {cores} core{'s' * (cores > 1)} of an {here['device']}"


def _finish(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)  # from top to bottom, without margins
    axes.spines[["top", "right"]].set_visible(False)
