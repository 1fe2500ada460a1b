"""What several commands show on the terminal: tables of figures, progress, and texts with drafted tokens marked."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table

NARROWEST = 120  # columns; a narrower terminal or a pipe gets whole figures on wrapped lines, never cut ones
DRAFTED = "green underline"  # two signs: one is seen without colours, the other where terminals show no underline


def wide_console() -> Console:
    """Standard output, wide enough for every table."""
    console = Console()
    console.width = max(console.width, NARROWEST)
    return console


def figure_table(*columns: str, left: str) -> Table:
    """A table of whole figures, right-aligned but for the column of names called ``left``."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        found.add_column(column, justify="left" if column == left else "right", no_wrap=True)
    return found


def bar() -> Progress:
    """A progress bar with the time left, on stderr and only where that is a terminal. It leaves no trace."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def status(what: str, every: float = 10.0) -> Iterator[Callable[[str], None]]:
    """What is going on, on stderr, and a function to say something else.

    On a terminal one line that changes and leaves no trace; in a log a line at once, and later at most one in so many
    seconds.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as line:
            yield line.update
        return
    last = -math.inf

    def say(text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= every:
            last = now
            print(f"{text} ...", file=sys.stderr, flush=True)

    say(what)
    yield say


def write_marked(console: Console, marked: Iterable[tuple[str, bool]]) -> None:
    """Write pieces of text (`hydrajax.text.marking.pieces`), the drafted ones styled, and end the line."""
    # As segments: printed as text, rich would wrap lines, expand tabs and drop some control characters.
    segments = [Segment(text, Style.parse(DRAFTED) if is_drafted else None) for text, is_drafted in marked]
    console.print(Segments([*segments, Segment.line()]), crop=False, end="")
