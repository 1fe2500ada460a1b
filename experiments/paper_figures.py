"""One picture for each kind of result (`hydrajax.bench.report.results.KINDS`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hydrajax.bench.report.drawing import new_figure
from hydrajax.bench.report.markdown import distinct, fastest
from hydrajax.bench.report.results import Result

TAU = "tokens_per_step (τ)"
RATE = "tokens/s, all sequences"
LONGEST_LABEL = 60
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = {"searched": "o", "dynamic": "^", "chain": "+", "released": "x", "dense": "."}
LINES = {"searched": "-", "dynamic": "--"}  # line styles of searched trees over their sizes


def draw(result: Result) -> Any:
    """Draw a result as a `matplotlib.figure.Figure`."""
    return DRAWN[result.kind]([{name: _label(value) for name, value in row.items()} for row in result.rows])


def _label(value: Any) -> Any:
    """Shorten texts and escape dollar signs, which matplotlib reads as formulas."""
    if not isinstance(value, str):
        return value
    return (value if len(value) <= LONGEST_LABEL else f"{value[:LONGEST_LABEL]}...").replace("$", r"\$")


# --- decode configurations -------------------------------------------------------------------------------------------


def _speed(rows: list[dict]) -> Any:
    return _batches(rows) if len(distinct(rows, "batch")) > 1 else _bars(rows)


def _bars(rows: list[dict]) -> Any:
    figure = new_figure(9, 1.2 + 0.42 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    y = np.arange(len(rows))
    for axes, field, label in ((left, "tokens_per_second", "tokens/s"), (right, "tokens_per_step", TAU)):
        values = [row[field] for row in rows]
        axes.barh(y, values, color=[f"C{i}" for i in range(len(rows))])
        for at, row, value in zip(y, rows, values, strict=True):
            text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            end = max(value, row["high"] or 0) if axes is left else value
            axes.annotate(f" {text}", (end, at), va="center", fontsize=8)
        axes.set(xlabel=label, yticks=y, yticklabels=[row["name"] for row in rows])
        axes.margins(x=0.14)
    for at, row in zip(y, rows, strict=True):
        if row["low"] is not None:
            left.plot([row["low"], row["high"]], [at, at], color="black", linewidth=1.2)
    left.invert_yaxis()
    return figure


def _batches(rows: list[dict]) -> Any:
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    for i, name in enumerate(distinct(rows, "name")):
        mine = sorted((row for row in rows if row["name"] == name), key=lambda row: row["batch"])
        batches, rates = [row["batch"] for row in mine], np.array([row["tokens_per_second"] for row in mine])
        left.plot(batches, rates, "o-", color=f"C{i}", label=name)
        right.plot(batches, 1e3 * np.array(batches) / rates, "o-", color=f"C{i}")
        spread = [row for row in mine if row["low"] is not None]
        ends = [[row[end] for row in spread] for end in ("low", "high")]
        left.fill_between([row["batch"] for row in spread], *ends, color=f"C{i}", alpha=0.15, linewidth=0)
    for axes, label in ((left, RATE), (right, "ms per token of each sequence")):
        axes.set(xlabel="batch size", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(distinct(rows, "batch"), map(str, distinct(rows, "batch")))
        axes.minorticks_off()
    _legend(figure, ncols=3)
    return figure


# --- trees ------------------------------------------------------------------------------------------------------------


def _trees(rows: list[dict]) -> Any:
    """Throughput (top) and tokens_per_step (bottom) over the nodes, one column per drafter."""
    drafters, batches = distinct(rows, "drafter"), distinct(rows, "batch")
    figure = new_figure(max(5.5, 4.2 * len(drafters)), 6.4)
    grid = figure.subplots(2, len(drafters), sharex=True, sharey="row", squeeze=False)
    for (above, below), drafter in zip(grid.T, drafters, strict=True):
        for i, batch in enumerate(batches):
            mine = [row for row in rows if (row["drafter"], row["batch"]) == (drafter, batch)]
            _curves(above, mine, "tokens_per_second", f"C{i}")
            if best := [row for row in mine if row["family"] in LINES]:
                top = fastest(best)
                above.plot(top["nodes"], top["tokens_per_second"], "*", color=f"C{i}", markersize=13)
            if batch == batches[0]:
                _curves(below, mine, "tokens_per_step", f"C{i}")
                grown = [row for row in mine if row["family"] in ("root", "searched")]
                predicted = [(row["nodes"], row["expected"]) for row in grown if row["expected"] is not None]
                if predicted:
                    below.plot(*zip(*sorted(predicted), strict=True), "k:", linewidth=1)
        above.set(title=drafter, xscale="log", yscale="log")
        below.set(xlabel="nodes", xticks=(ticks := _powers_of_two(rows)), xticklabels=map(str, ticks))
        below.minorticks_off()
    grid[0, 0].set_ylabel(RATE)
    grid[1, 0].set_ylabel(f"{TAU}, batch {batches[0]}")
    handles = [grid[0, -1].plot([], [], color=f"C{i}", label=f"batch {batch}")[0] for i, batch in enumerate(batches)]
    for family in distinct(rows, "family"):
        handles += grid[0, -1].plot([], [], _marker(family), color="0.4", linestyle=LINES.get(family, ""), label=family)
    if any(row["expected"] is not None for row in rows):
        handles += grid[0, -1].plot([], [], "k:", label="expected τ")
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _powers_of_two(rows: Sequence[dict]) -> list[int]:
    return [2**n for n in range(max(row["nodes"] for row in rows).bit_length())]


def _marker(family: str) -> str:
    return MARKERS.get(family, "s")


def _curves(axes: Any, rows: list[dict], field: str, color: str) -> None:
    for family in distinct(rows, "family"):
        mine = sorted((row for row in rows if row["family"] == family), key=lambda row: row["nodes"])
        axes.plot(
            [row["nodes"] for row in mine], [row[field] for row in mine], _marker(family), color=color, markersize=5,
            linestyle=LINES.get(family, ""),
        )  # fmt: skip


# --- rules ------------------------------------------------------------------------------------------------------------


def _acceptance(rows: list[dict]) -> Any:
    """One column per varied parameter: tokens_per_step above, likelihood under the base below."""
    parameters = [name for name in distinct(rows, "parameter") if name is not None]
    with_nats = any(row["nats"] is not None for row in rows)
    figure = new_figure(max(6, 4.8 * len(parameters)), 6.6 if with_nats else 4)
    grid = figure.subplots(1 + with_nats, len(parameters) or 1, sharex="col", sharey="row", squeeze=False)
    fields = [("tokens_per_step", TAU), ("nats", "nats per token under the base")][: 1 + with_nats]
    colors = {drafter: f"C{i}" for i, drafter in enumerate(distinct(rows, "drafter"))}
    styles = dict(zip(distinct(rows, "rule"), STYLES * 3, strict=False))
    for line, (field, label) in zip(grid, fields, strict=True):
        line[0].set_ylabel(label)
        for axes, parameter in zip(line, parameters, strict=False):
            if field == fields[-1][0]:
                axes.set_xlabel({"epsilon": "posterior threshold ε"}.get(parameter, parameter))
            for drafter, color in colors.items():
                for rule, style in styles.items():
                    mine = [row for row in rows if (row["drafter"], row["rule"]) == (drafter, rule)]
                    mine = [row for row in mine if row[field] is not None]
                    curve = sorted((row["value"], row[field]) for row in mine if row["parameter"] == parameter)
                    name = f"{drafter}, {rule}"
                    if curve:
                        points = zip(*curve, strict=True)
                        axes.plot(*points, "o", linestyle=style, color=color, label=name, markersize=4)
                    for row in (row for row in mine if row["parameter"] is None):
                        axes.axhline(row[field], color=color, linestyle=style, linewidth=1, label=name)
    _legend(figure, ncols=3)
    return figure


def _legend(figure: Any, ncols: int) -> None:
    """One legend below all panels, each label once."""
    labels = {}
    for axes in figure.axes:
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=ncols, fontsize=8)


# --- costs ------------------------------------------------------------------------------------------------------------


def _overhead(rows: list[dict]) -> Any:
    parts = {"prefix attention": [row["prefix_attention"] or 0.0 for row in rows]}
    for k in range(max(len(row["heads"]) for row in rows)):
        parts[f"head {k + 1}"] = [row["heads"][k] if k < len(row["heads"]) else 0.0 for row in rows]
    figure = _stacked([row["drafter"] for row in rows], parts, "ms per step")
    _legend(figure, ncols=5)
    return figure


def _steps(rows: list[dict]) -> Any:
    names = [f"{row['tree']}, batch {row['batch']}" for row in rows]
    verbs = ("propose", "verify", "accept_commit", "observe")
    figure = _stacked(names, {verb: [row[verb] for row in rows] for verb in verbs}, "ms per step")
    for at, row in enumerate(rows):
        place = [row["autoregressive_step"]] * 2, [at - 0.45, at + 0.45]
        figure.axes[0].plot(*place, "k--", linewidth=1, label="an autoregressive step")
    _legend(figure, ncols=5)
    return figure


def _stacked(names: list[str], parts: dict[str, list[float]], label: str) -> Any:
    figure = new_figure(8, 1.5 + 0.4 * len(names))
    axes = figure.subplots()
    y, left = np.arange(len(names)), np.zeros(len(names))
    for i, (name, values) in enumerate(parts.items()):
        axes.barh(y, values, left=left, color=f"C{i}", label=name)
        left = left + np.array(values)
    axes.set(xlabel=label, yticks=y, yticklabels=names)
    axes.invert_yaxis()
    return figure


def _prediction(rows: list[dict]) -> Any:
    figure = new_figure(5.5, 5)
    axes = figure.subplots()
    for field, label, marker in (("step", "tree step", "o"), ("autoregressive_step", "autoregressive step", "x")):
        axes.plot([row[field] for row in rows], [row[f"predicted_{field}"] for row in rows], marker, label=label)
    values = [row[field] for row in rows for field in ("step", "autoregressive_step", "predicted_step")]
    ends = np.array([min(values) * 0.8, max(values) * 1.25])
    axes.plot(ends, ends, color="0.4", linewidth=1)
    axes.fill_between(ends, ends * 0.75, ends * 1.25, color="0.4", alpha=0.15, linewidth=0, label="within 25%")
    axes.set(xlabel="ms measured", ylabel="ms predicted", xscale="log", yscale="log")
    ticks = [round(m * 10.0**e, 3) for e in range(-3, 5) for m in (1, 2, 5) if ends[0] < m * 10.0**e < ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure


def _program(rows: list[dict]) -> Any:
    """Moved bytes / floor, one group of bars per program. Colours are batch sizes, shades contexts."""
    names, batches, contexts = distinct(rows, "what"), distinct(rows, "batch"), distinct(rows, "context")
    cells = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    figure = new_figure(max(7, 0.15 * len(names) * len(cells)), 4.6)
    axes = figure.subplots()
    width = 0.8 / len(cells)
    for i, (batch, context) in enumerate(cells):
        mine = [row for row in rows if (row["batch"], row["context"]) == (batch, context)]
        x = np.array([names.index(row["what"]) for row in mine]) + (i + 0.5) * width - 0.4
        ratios = [row["gigabytes"] / row["floor_gigabytes"] for row in mine]
        shade = {"color": f"C{batches.index(batch)}", "alpha": (1 + contexts.index(context)) / len(contexts)}
        axes.bar(x, ratios, width, label=f"batch {batch}, context {context}", **shade)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(ylabel="bytes moved / floor", xticks=range(len(names)), xticklabels=names)
    _legend(figure, ncols=min(len(batches), 4))
    return figure


def _tpu_program(rows: list[dict]) -> Any:
    """Cycles / floor, one group of bars per program. Colours are chips, shades batch sizes."""
    rows = [row for row in rows if row["fits"]]
    names, chips, batches = distinct(rows, "what"), distinct(rows, "chip"), distinct(rows, "batch")
    cells = list(dict.fromkeys((row["chip"], row["batch"]) for row in rows))
    figure = new_figure(max(7, 0.25 * len(names) * len(cells)), 4.6)
    axes = figure.subplots()
    width = 0.8 / max(len(cells), 1)
    for i, (chip, batch) in enumerate(cells):
        mine = [row for row in rows if (row["chip"], row["batch"]) == (chip, batch)]
        x = np.array([names.index(row["what"]) for row in mine]) + (i + 0.5) * width - 0.4
        shade = {"color": f"C{chips.index(chip)}", "alpha": (1 + batches.index(batch)) / len(batches)}
        axes.bar(
            x, [row["cycles"] / row["floor_cycles"] for row in mine], width, label=f"{chip}, batch {batch}", **shade
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set(ylabel="cycles / floor, compiled", xticks=range(len(names)), xticklabels=names)
    _legend(figure, ncols=min(len(cells), 4))
    return figure


# --- questions and heads ----------------------------------------------------------------------------------------------


def _categories(rows: list[dict]) -> Any:
    names, categories = distinct(rows, "name"), distinct(rows, "category")
    figure = new_figure(max(7, 0.55 * len(categories) + 3), 4.6)
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        mine = {row["category"]: row for row in rows if row["name"] == name}
        x = np.array([at for at, category in enumerate(categories) if category in mine]) + (i + 0.5) * width - 0.4
        found = [mine[category] for category in categories if category in mine]
        axes.bar(x, [row["speedup"] for row in found], width, color=f"C{i}", label=name)
        for at, row in zip(x, found, strict=True):
            if row["low"] is not None:
                axes.plot([at, at], [row["low"], row["high"]], color="black", linewidth=0.8)
    axes.axhline(1, color="0.4", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(categories)), categories, rotation=45, ha="right")
    axes.set_ylabel("speed-up")
    _legend(figure, ncols=2)
    return figure


def _quality(rows: list[dict]) -> Any:
    """One panel per metric of each set: scores with intervals, by rule and configuration."""
    panels, rules = list(dict.fromkeys((row["set"], row["metric"]) for row in rows)), distinct(rows, "rule")
    names = distinct(rows, "name")
    figure = new_figure(max(6, 3.4 * len(panels)), 1.6 + len(rules) * (0.25 + 0.16 * len(names)))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (found, metric) in zip(grid, panels, strict=True):
        for i, name in enumerate(names):
            mine = [row for row in rows if (row["set"], row["metric"], row["name"]) == (found, metric, name)]
            y = np.array([rules.index(row["rule"]) for row in mine]) + 0.7 * (i + 0.5) / len(names) - 0.35
            axes.plot([row["score"] for row in mine], y, "o", color=f"C{i}", markersize=5, label=name)
            for at, row in zip(y, mine, strict=True):
                if row["low"] is not None:
                    axes.plot([row["low"], row["high"]], [at, at], color=f"C{i}", linewidth=1.2)
        axes.set(title=found, xlabel=metric, yticks=range(len(rules)), yticklabels=rules)
        axes.grid(axis="x", linewidth=0.4)
    grid[0].invert_yaxis()
    _legend(figure, ncols=4)
    return figure


def _accuracy(rows: list[dict]) -> Any:
    """One panel per head: share of positions at which the first 1, 2 ... guesses include the true token."""
    heads = sorted(distinct(rows, "head"))
    figure = new_figure(max(4, 2.6 * len(heads)), 3.8)
    panels = figure.subplots(1, len(heads), sharey=True, squeeze=False)[0]
    for axes, head in zip(panels, heads, strict=True):
        for i, drafter in enumerate(distinct(rows, "drafter")):
            mine = sorted((r["top"], r["accuracy"]) for r in rows if (r["drafter"], r["head"]) == (drafter, head))
            if mine:
                axes.plot(*zip(*mine, strict=True), "o-", color=f"C{i}", markersize=4, label=drafter)
        axes.set(title=f"head {head + 1}", xlabel="guesses", ylim=(0, 1))
        axes.set_xticks(sorted(distinct(rows, "top")))
    panels[0].set_ylabel("true token among them")
    _legend(figure, ncols=4)
    return figure


def _curve(rows: list[dict]) -> Any:
    figure = new_figure(6.4, 4.4)
    axes = figure.subplots()
    for i, name in enumerate(distinct(rows, "name")):
        mine = sorted((row["at"], row["tokens_per_step"]) for row in rows if row["name"] == name)
        axes.plot(*zip(*mine, strict=True), "o-", color=f"C{i}", markersize=4, label=name)
    axes.set(xlabel=rows[0]["over"], ylabel=TAU)
    axes.set_ylim(bottom=1)  # without a draft
    axes.grid(linewidth=0.4)
    _legend(figure, ncols=3)
    return figure


# --- sizes of drafts --------------------------------------------------------------------------------------------------

PANELS = (  # x field, x label, y field, y label, whether smaller x is better
    ("draft_megabytes", "draft (MB)", "tokens_per_step", TAU, True),
    ("tokens_per_second", "tokens/s", "tokens_per_step", TAU, False),
    ("predicted_gigabytes", "draft (GB), predicted", "predicted_speedup", "speed-up, predicted", True),
)
SHAPES = "osD^vP*X"


def front(points: Sequence[tuple[float, float]], less_is_better: bool) -> list[tuple[float, float]]:
    """Return the Pareto-optimal points (x, y), rising in x. Larger y is better; smaller x is, or larger."""
    best, kept = -np.inf, []
    for x, y in sorted(points, key=lambda point: (point[0] if less_is_better else -point[0], -point[1])):
        if y > best:
            best, kept = y, [*kept, (x, y)]
    return sorted(kept)


def _pareto(rows: list[dict]) -> Any:
    """Colours are kinds of heads, shapes their lm heads, the line is the Pareto front."""
    figure = new_figure(12, 4.6)
    drafters, lm_heads = distinct(rows, "drafter"), distinct(rows, "lm_head")
    for axes, (across, across_label, up, up_label, less_is_better) in zip(figure.subplots(1, 3), PANELS, strict=True):
        points = front([(row[across], row[up]) for row in rows], less_is_better)
        axes.plot(*zip(*points, strict=True), color="0.6", linewidth=1, label="Pareto front")
        for row in rows:
            look = {"color": f"C{drafters.index(row['drafter'])}"}
            look["marker"] = SHAPES[lm_heads.index(row["lm_head"]) % len(SHAPES)]
            name = f"{row['drafter']}, {row['lm_head']}"
            axes.plot(row[across], row[up], linestyle="", markersize=7, label=name, **look)
        axes.set(xlabel=across_label, ylabel=up_label)
        if less_is_better:
            axes.set_xscale("log")
            least, most = axes.get_xlim()
            ticks = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 5)]
            ticks = [tick for tick in ticks if least <= tick <= most]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
    _legend(figure, ncols=5)
    return figure


DRAWN: dict[str, Callable[[list[dict]], Any]] = {
    "speed": _speed,
    "trees": _trees,
    "acceptance": _acceptance,
    "overhead": _overhead,
    "categories": _categories,
    "quality": _quality,
    "accuracy": _accuracy,
    "curve": _curve,
    "pareto": _pareto,
    "steps": _steps,
    "prediction": _prediction,
    "program": _program,
    "tpu_program": _tpu_program,
}
