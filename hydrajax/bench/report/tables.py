"""Tables on the terminal and in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 2000  # columns, wider than any table: narrow terminals and pipes get whole cells on wrapped lines


def cell(value: Any) -> str:
    """Format one value: three significant digits for floats, yes or NO for booleans, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return ", ".join(map(cell, value)) if isinstance(value, list | tuple) else str(value)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Sequence[str] = (),
    title: str | None = None,
    bold: int | None = None,
) -> None:
    """Print a table on standard output. Cells are never cut or wrapped.

    Args:
        rows: cells as text, or values for `cell`.
        left: headings of left-aligned columns; all others are right-aligned.
        bold: index of a row to emphasise.
    """
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False)
    if title is not None:
        console.print(title, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(cell, row), style="bold" if number == bold else None)
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table with a left-aligned first column."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(['---'] + ['---:'] * (len(columns) - 1))}|"]
    return lines + [f"| {' | '.join(cell(value).replace('|', chr(92) + '|') for value in row)} |" for row in rows]
