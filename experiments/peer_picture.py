"""Tables and pictures of what cpu_peers.py measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydrajax.bench.report.drawing import GREEN, GREY, LIGHT, new_figure

PLAIN = "hydrajax, autoregressive"
NO_DRAFT = "no draft"
# By the beginnings of the types' names: ours, GGUF's and those of OpenVINO's files, which it computes in float32.
GROUPS = {"computed in float32": ("float32", "F32", "F16"), "in 4 bits": ("int4", "Q4")}
BARS = 5  # of a group
TITLES = {"smollm2": "SmolLM2-135M-Instruct", "18m": "the bundled model"}
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


def groups_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows that are drawn, at most `BARS` of float32 and of 4 bits: the fastest way of each other program,
    then hydrajax without a draft and with its fastest drafts.
    """
    found = {}
    for group, kinds in GROUPS.items():
        inside = [row for row in rows if type_of(row).startswith(kinds)]
        peers: dict[str, Mapping[str, Any]] = {}
        for row in sorted(inside, key=speed_of):
            if not is_ours(row):
                peers[row["name"].split()[0].rstrip(",")] = row
        drafted = [row for row in inside if is_ours(row) and way_of(row) != NO_DRAFT]
        most = BARS - 1 - len(peers)
        kept = sorted(drafted, key=speed_of)[-most:] if most > 0 else []
        ours = [row for row in inside if is_ours(row) and (way_of(row) == NO_DRAFT or row in kept)]
        if inside:
            found[group] = [*peers.values(), *ours]
    return found


def speed_of(row: Mapping[str, Any]) -> float:
    return row["tokens_per_second"]


def is_ours(row: Mapping[str, Any]) -> bool:
    return row["name"].startswith("hydrajax")


def type_of(row: Mapping[str, Any]) -> str:
    """Return the type of weights in the name of a row; hydrajax alone means float32."""
    program, _, kind = row["name"].partition(",")[0].rpartition(" ")
    return kind if program else "float32"


def way_of(row: Mapping[str, Any]) -> str:
    """Return the draft in the name of a row, without its tree."""
    way = row["name"].split(", ")[1]
    return NO_DRAFT if way in ("autoregressive", "greedy") else way[0].lower() + way[1:] if way == "Lookup" else way


def front_table(content: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """Return the columns and cells of the README's table: hydrajax's speeds by draft in float32 and in 4 bits."""
    own: dict[str, dict[str, float]] = {kind: {} for kind in ("float32", "int4")}
    for row in content["results"]:
        if is_ours(row) and type_of(row) in own:
            own[type_of(row)][way_of(row)] = speed_of(row)
    columns = ("tokens/s", "float32", "to no draft", "4 bits", "to no draft", "to float32")
    cells = []
    for way, plain in own["float32"].items():
        low = own["int4"][way]
        ratios = plain / own["float32"][NO_DRAFT], low / own["int4"][NO_DRAFT], low / plain
        first, second, third = (f"{ratio:.2f}x" for ratio in ratios)
        cells.append((way, digits(plain), first, digits(low), second, third))
    return columns, cells


def speed_picture(content: Mapping[str, Any]) -> Any:
    """Draw the tokens per second of decoders in one run, in two groups: computed in float32, and in 4 bits."""
    bars: list[tuple[str, float | None, str]] = []
    for group, rows in groups_of(content["results"]).items():
        bars.append((f"{group}:", None, GREY))
        for row in rows:
            program = "hydrajax" if is_ours(row) else row["name"].partition(",")[0].rpartition(" ")[0]
            bars.append((f"{program}, {way_of(row)}", speed_of(row), GREEN if is_ours(row) else GREY))
    most = max(speed for _, speed, _ in bars if speed)
    builds = [f"{title}: {build}" for title, build in content.get("builds", {}).items()]
    figure = new_figure(8.6, 1.2 + 0.26 * len(bars) + 0.15 * len(builds))
    axes = figure.subplots()
    for at, (_, speed, colour) in enumerate(bars):
        if speed is not None:
            axes.barh(at, speed, color=colour)
            axes.text(speed + most / 150, at, digits(speed), va="center", fontsize=9)
    _finish(axes, [name for name, *_ in bars])
    asked, here = content["arguments"], content["machine"]
    cores = asked["threads"] or here["cores"]
    count = content["results"][0]["prompts"]
    what = f"tokens per second, {count} {'questions of MT-Bench' if asked['questions'] else 'prompts'}"
    axes.set_xlabel("\n".join([what, *builds]), fontsize=9)
    title = f"{TITLES.get(asked['model'], asked['model'])}, {cores} core{'s' * (cores > 1)} of an {here['device']}"
    axes.set_title(title, fontsize=10, loc="left")
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
