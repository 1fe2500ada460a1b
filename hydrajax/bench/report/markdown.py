"""Results as tables, on the terminal and in a Markdown file."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrajax.bench.report.results import KINDS, Result, map_texts
from hydrajax.bench.report.tables import markdown_table
from hydrajax.files import WholeFile

INTRODUCTION = """\
# Results

*tokens_per_step* (τ) is the mean number of tokens that a step emits, the root token included; the papers call it
acceptance length or acceleration rate. A *speed-up* is relative to autoregressive decoding by this package, timed in
the same rounds after warm-up. Intervals are 95% bootstrap intervals.
"""

Table = tuple[Sequence[str], list[Sequence[Any]]]
MakeTable = Callable[[list[dict]], Table]


def write_report(results: Sequence[tuple[Path, Result]], path: str | Path) -> None:
    """Write a table of every result to ``path``."""
    with WholeFile(path, "output") as file:
        file.write_text("\n".join([INTRODUCTION, *(section(result, source.name) for source, result in results)]))


def section(
    result: Result, file: str, picture: str | None = None, tables: Mapping[str, MakeTable] | None = None
) -> str:
    """Return one result as Markdown. Texts of the file become neither links nor HTML.

    Args:
        picture: path of a picture to show above the table.
        tables: functions for kinds whose table differs from `TABLES`.
    """
    command, file, result = _code(result.command), _code(file), Result(**map_texts(vars(result), _escaped))
    source = result.source[:1].upper() + result.source[1:]
    heading = f"{source}: {result.title}" if source else result.title[:1].upper() + result.title[1:]
    lines = [f"## {heading}", "", *([f"![{heading}]({picture})", ""] if picture else [])]
    lines += [*markdown_table(*table_of(result, tables)), "", *(f"- {remark}" for remark in result.remarks)]
    if result.settings:
        shown = {
            name: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for name, v in result.settings.items()
        }
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in shown.items()))
    if result.machine:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in result.machine.items()))
    made = f", made by `{command}`" if command else ""
    return "\n".join([*lines, f"- all figures: `{file}`{made}", ""])


def table_of(result: Result, tables: Mapping[str, MakeTable] | None = None) -> Table:
    """Return the columns and cells of a result. Kinds without a table of their own show all fields."""
    make = (TABLES | dict(tables or {})).get(result.kind)
    fields = [*KINDS.get(result.kind, result.rows[0])]
    return make(result.rows) if make else (fields, [[row.get(name) for name in fields] for row in result.rows])


def distinct(rows: Sequence[dict], field: str) -> list:
    """Return the values of a field in the order of their first appearance."""
    return list(dict.fromkeys(row[field] for row in rows))


def fastest(rows: Sequence[dict]) -> dict:
    return max(rows, key=lambda row: row["tokens_per_second"])


def _escaped(text: str) -> str:
    return re.sub(r"\](?=[(\[:])", r"]\\", text.replace("\\", "\\\\").replace("<", "&lt;"))


def _code(text: str) -> str:
    return re.sub(r"\s", " ", text).replace("`", "'")


# --- the table of each kind -------------------------------------------------------------------------------------------

RATE_COLUMNS = ("τ", "tokens/s", "95%", "speed-up")
EQUAL = {True: "yes", False: "**no**", None: ""}


def rate_cells(row: dict) -> list[str]:
    interval = "" if row["low"] is None else f"{row['low']:.0f} to {row['high']:.0f}"
    return [f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_second']:.0f}", interval, f"{row['speedup']:.2f}x"]


def _speed(rows: list[dict]) -> Table:
    ordered = sorted(rows, key=lambda row: row["batch"])
    cells = [[row["name"], row["batch"], row["nodes"], *rate_cells(row), EQUAL[row["equal"]]] for row in ordered]
    return ("", "batch", "nodes", *RATE_COLUMNS, "equal output"), cells


def _trees(rows: list[dict]) -> Table:
    """The fastest tree of each family."""
    families: dict[tuple, list[dict]] = {}
    for row in rows:
        families.setdefault((row["drafter"], row["batch"], row["family"]), []).append(row)
    drafters, cells = distinct(rows, "drafter"), []
    for drafter, batch, family in sorted(families, key=lambda key: (drafters.index(key[0]), key[1])):
        best = fastest(families[drafter, batch, family])
        expected = "" if best["expected"] is None else f"{best['expected']:.2f}"
        cells.append([drafter, batch, family, best["name"], best["nodes"], expected, *rate_cells(best)])
    return ("heads", "batch", "fastest of", "tree", "nodes", "τ expected", *RATE_COLUMNS), cells


def _categories(rows: list[dict]) -> Table:
    names, cells = distinct(rows, "name"), []
    for category in distinct(rows, "category"):
        found = {row["name"]: row for row in rows if row["category"] == category}
        line = [category, next(iter(found.values()))["questions"]]
        for row in map(found.get, names):
            line.append("" if row is None else f"{row['speedup']:.2f}x (τ {row['tokens_per_step']:.2f})")
        equal = [row["equal"] for row in found.values()]
        cells.append([*line, EQUAL[None if None in equal else all(equal)]])
    return ("category", "questions", *names, "equal output"), cells


def _accuracy(rows: list[dict]) -> Table:
    tops, found = sorted(distinct(rows, "top")), {}
    for row in rows:
        found.setdefault((row["drafter"], row["head"]), {})[row["top"]] = f"{row['accuracy']:.1%}"
    drafters = distinct(rows, "drafter")
    heads = sorted(found, key=lambda key: (drafters.index(key[0]), key[1]))
    cells = [[drafter, head + 1, *(found[drafter, head].get(top) for top in tops)] for drafter, head in heads]
    return ("heads", "head", *(f"top {top}" for top in tops)), cells


def _steps(rows: list[dict]) -> Table:
    times = ("autoregressive_step", "step", "verify", "propose", "accept_commit", "observe")
    cells = [
        [row["tree"], row["batch"], row["nodes"], *(f"{row[name]:.3g}" for name in times), f"{row['break_even']:.2f}"]
        for row in rows
    ]
    return ("tree", "batch", "nodes", *(f"{name.replace('_', ' ')} (ms)" for name in times), "τ to break even"), cells


TABLES: dict[str, MakeTable] = {
    "speed": _speed, "trees": _trees, "categories": _categories, "accuracy": _accuracy, "steps": _steps,
}  # fmt: skip
