"""Results as Markdown with pictures, in the order of the papers' figures and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import WholeFile
from hydrajax.optional_deps import needs
from hydrajax.report.drawing import can_draw, save_png
from hydrajax.report.figures import distinct, draw, fastest
from hydrajax.report.results import Result, each_text

PAPERS = ("hydra", "medusa", "amphista")
PICTURES = "figures"  # the folder beside the report

WORDS = """\
*tokens_per_step* (τ) is the mean number of tokens that a step emits, the root token included; the papers say acceptance
length or acceleration rate. A *speed-up* is against autoregressive decoding by this package, timed in the same rounds
after warm-up. Intervals are 95% bootstrap intervals."""
DRAWN = "The pictures beside the tables are drawn from the same files."


def write_report(
    results: Sequence[tuple[Path, Result]],
    path: str | Path,
    flag: str = "output",
    on_result: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write the report to ``path`` and its pictures into a folder `PICTURES` beside it; returns what was written.

    Where matplotlib is not installed there are tables only, and the report says so. Raises `HydrajaxError` where
    something cannot be written.
    """
    folder, pictures = Path(path).parent / PICTURES, can_draw()
    parts, written = ["# Results\n", f"{WORDS} {DRAWN}\n" if pictures else f"{WORDS}\n\n{needs('matplotlib')}\n"], []
    with WholeFile(path, flag) as file:  # an unwritable report is refused before anything is drawn
        if pictures:
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise HydrajaxError(f"{flag}: cannot make {folder}: {error.strerror}") from None
        names: set[str] = set()
        for source, result in sorted(results, key=lambda found: _place(*found)):
            stem = source.stem if source.suffix == ".json" else result.kind
            name = _unused(re.sub(r"[^\w.-]+", "-", stem)[:100], names)
            on_result(name)
            try:
                parts.append(section(result, f"{PICTURES}/{name}.png" if pictures else None, source.name))
                if pictures:
                    written.append(folder / f"{name}.png")
                    save_png(draw(result), written[-1], flag)
            except (ArithmeticError, ValueError, LookupError, TypeError, RuntimeError) as error:
                if isinstance(error, HydrajaxError):
                    raise
                # Numbers that nobody measures, of which matplotlib and its tables raise many types.
                raise HydrajaxError(f"report: {source} cannot be drawn: {one_line(error)}") from None
        file.write_text("\n".join(parts))
    return [Path(path), *written]


def _place(path: Path, result: Result) -> tuple:
    """Hydra's figures first, then the other papers', tables after figures; what belongs to no paper last."""
    paper, _, rest = result.source.partition(" ")
    number = re.search(r"\d+", rest)
    return (
        PAPERS.index(paper) if paper in PAPERS else len(PAPERS), rest.startswith("table"),
        int(number[0]) if number else 0, result.source, str(path),
    )  # fmt: skip


def _unused(name: str, taken: set[str]) -> str:
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}-{count}"
    taken.add(found)
    return found


def section(result: Result, picture: str | None, file: str) -> str:
    """One result in Markdown, without a picture where there is none. Its texts become no links and no HTML."""
    command, file, result = _code(result.command), _code(file), Result(**each_text(vars(result), _escaped))
    source = result.source[:1].upper() + result.source[1:]
    heading = f"{source}: {result.title}" if source else result.title[:1].upper() + result.title[1:]
    lines = [f"## {heading}", "", *([f"![{heading}]({picture})", ""] if picture else [])]
    lines += [*table(*TABLES[result.kind](result.rows)), ""]
    lines += [f"- {remark}" for remark in result.remarks]
    if result.settings:
        lines.append("- " + ", ".join(f"{name} {_plain(value)}" for name, value in result.settings.items()))
    if result.machine:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in result.machine.items()))
    made = f", made by `{command}`" if command else ""
    return "\n".join([*lines, f"- all figures: `{file}`{made}", ""])


def _escaped(text: str) -> str:
    """The same, in which Markdown finds no link, picture or HTML."""
    return re.sub(r"\](?=[(\[:])", r"]\\", text.replace("\\", "\\\\").replace("<", "&lt;"))


def _code(text: str) -> str:
    """A text to stand between backquotes, on one line."""
    return re.sub(r"\s", " ", text).replace("`", "'")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, its first column to the left."""
    head = ["| " + " | ".join(columns) + " |", "|" + "|".join(["---"] + ["---:"] * (len(columns) - 1)) + "|"]
    return head + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


# --- the table of each kind -------------------------------------------------------------------------------------------

Table = tuple[Sequence[str], list[Sequence[str]]]


def _rate(row: dict) -> list[str]:
    interval = "" if row["low"] is None else f"{row['low']:.0f} to {row['high']:.0f}"
    return [f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_second']:.0f}", interval, f"{row['speedup']:.2f}x"]


RATE_COLUMNS = ("τ", "tokens/s", "95%", "speed-up")
EQUAL = {True: "yes", False: "**no**", None: ""}


def _speed(rows: list[dict]) -> Table:
    ordered = sorted(rows, key=lambda row: row["batch"])
    cells = [[row["name"], str(row["batch"]), str(row["nodes"]), *_rate(row), EQUAL[row["equal"]]] for row in ordered]
    return ("", "batch", "nodes", *RATE_COLUMNS, "equal output"), cells


def _trees(rows: list[dict]) -> Table:
    """The fastest tree of each family."""
    cells = []
    for drafter in distinct(rows, "drafter"):
        for batch in sorted(distinct(rows, "batch")):
            mine = [row for row in rows if (row["drafter"], row["batch"]) == (drafter, batch)]
            for family in distinct(mine, "family"):
                row = fastest([row for row in mine if row["family"] == family])
                expected = "" if row["expected"] is None else f"{row['expected']:.2f}"
                fixed = [drafter, str(batch), family, row["name"], str(row["nodes"]), expected]
                cells.append([*fixed, *_rate(row)])
    return ("heads", "batch", "fastest of", "tree", "nodes", "τ expected", *RATE_COLUMNS), cells


def _acceptance(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        value = "" if row["value"] is None else f"{row['parameter']} {row['value']:g}"
        nats = "" if row["nats"] is None else f"{row['nats']:.3f}"
        cells.append([row["drafter"], row["rule"], value, f"{row['tokens_per_step']:.2f}", nats])
    return ("heads", "rule", "at", "τ", "nats per token"), cells


def _overhead(rows: list[dict]) -> Table:
    most = max(len(row["heads"]) for row in rows)
    cells = []
    for row in rows:
        prefix = "" if row["prefix_attention"] is None else f"{row['prefix_attention']:.3g}"
        heads = [f"{value:.3g}" for value in row["heads"]] + [""] * (most - len(row["heads"]))
        cells.append([row["drafter"], prefix, *heads, f"{row['verify']:.3g}", f"{row['autoregressive_step']:.3g}"])
    heads = [f"head {k + 1}" for k in range(most)]
    return ("ms", "prefix attention", *heads, "verify", "autoregressive step"), cells


def _categories(rows: list[dict]) -> Table:
    names = distinct(rows, "name")
    cells = []
    for category in distinct(rows, "category"):
        found = {row["name"]: row for row in rows if row["category"] == category}
        line = [category, str(next(iter(found.values()))["questions"])]
        for name in names:
            row = found.get(name)
            line.append("" if row is None else f"{row['speedup']:.2f}x (τ {row['tokens_per_step']:.2f})")
        equal = [row["equal"] for row in found.values()]
        cells.append([*line, EQUAL[None if None in equal else all(equal)]])
    return ("category", "questions", *names, "equal output"), cells


def _quality(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        line = [row["set"], row["metric"], row["rule"], row["name"], str(row["questions"])]
        line += [f"{row['score']:.2f}", _ends(row["low"], row["high"], "")]
        line += [f"{row['difference']:+.2f}", _ends(row["difference_low"], row["difference_high"], "+")]
        cells.append([*line, f"{row['tokens_per_step']:.2f}", f"{row['speedup']:.2f}x", EQUAL[row["equal"]]])
    columns = ("metric", "rule", "", "questions", "score", "95%", "difference", "95%", "τ", "speed-up", "equal output")
    return ("set", *columns), cells


def _ends(low: float | None, high: float | None, sign: str) -> str:
    return "" if low is None else f"{low:{sign}.2f} to {high:{sign}.2f}"


def _accuracy(rows: list[dict]) -> Table:
    tops = sorted(distinct(rows, "top"))
    cells = []
    for drafter in distinct(rows, "drafter"):
        for head in sorted(distinct(rows, "head")):
            found = {row["top"]: row for row in rows if (row["drafter"], row["head"]) == (drafter, head)}
            if found:
                shares = [f"{found[top]['accuracy']:.1%}" if top in found else "" for top in tops]
                cells.append([drafter, str(head + 1), *shares])
    return ("heads", "head", *(f"top {top}" for top in tops)), cells


def _pareto(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        size = [f"{row['draft_megabytes']:.3g}", f"{row['draft_ms']:.3g}"]
        predicted = [f"{row['predicted_gigabytes']:.2f}", f"{row['predicted_speedup']:.2f}x"]
        cells.append([row["drafter"], row["lm_head"], *size, *_rate(row), EQUAL[row["equal"]], *predicted])
    columns = ("lm head", "draft MB", "draft ms", *RATE_COLUMNS, "equal output", "predicted GB", "predicted speed-up")
    return ("heads", *columns), cells


def _steps(rows: list[dict]) -> Table:
    times = ("autoregressive_step", "step", "verify", "propose", "accept_commit", "observe")
    cells = []
    for row in rows:
        line = [row["tree"], str(row["batch"]), str(row["nodes"]), *(f"{row[name]:.3g}" for name in times)]
        cells.append([*line, f"{row['break_even']:.2f}"])
    return ("tree", "batch", "nodes", *(f"{name.replace('_', ' ')} (ms)" for name in times), "τ to break even"), cells


def _prediction(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        line = [str(row["batch"]), str(row["context"]), str(row["nodes"])]
        for name in ("autoregressive_step", "step"):
            ours, theirs = row[f"predicted_{name}"], row[name]
            line += [f"{ours:.3g}", f"{theirs:.3g}", f"{ours / theirs - 1:+.0%}"]
        cells.append(line)
    columns = ("AR step predicted (ms)", "measured", "error", "step predicted (ms)", "measured", "error")
    return ("batch", "context", "nodes", *columns), cells


def _program(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        line = [row["what"], *(str(row[name]) for name in ("batch", "context", "nodes", "kernels"))]
        line += [f"{row['kernels_per_layer']:g}", f"{row['gigabytes']:.2f}", f"{row['floor_gigabytes']:.2f}"]
        line += [f"{row['gigabytes'] / row['floor_gigabytes']:.3f}"]
        line += [f"{row['copies']} ({row['copied_megabytes']:.0f} MB)", f"{row['temporary_megabytes']:.0f}"]
        cells.append([*line, "yes" if row["one_graph"] else "no"])
    counts = ("batch", "context", "nodes", "kernels", "a layer", "GB", "floor (GB)", "ratio")
    return ("program", *counts, "large copies", "temporary (MB)", "one CUDA graph"), cells


TABLES: dict[str, Callable[[list[dict]], Table]] = {
    "speed": _speed,
    "trees": _trees,
    "acceptance": _acceptance,
    "overhead": _overhead,
    "categories": _categories,
    "quality": _quality,
    "accuracy": _accuracy,
    "pareto": _pareto,
    "steps": _steps,
    "prediction": _prediction,
    "program": _program,
}
