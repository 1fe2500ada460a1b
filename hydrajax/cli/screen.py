"""Terminal output that several commands share: tables, progress, and text with drafted tokens marked."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Column

DRAFTED = "green underline"  # underlined for terminals without colours
OPEN, CLOSE = "⟦", "⟧"  # drafted tokens in files and pipes, which have no styles


def bar(*columns: str | ProgressColumn, **settings: Any) -> Progress:
    """Return a progress bar, shown on stderr if that is a terminal and erased at the end.

    ``columns`` follow the counts, by default the remaining time.
    """
    # The description is the last column and the only one that a narrow terminal cuts.
    description = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        *(columns or [TimeRemainingColumn(compact=True)]),
        description,
        console=Console(stderr=True),
        expand=True,
        transient=True,
        disable=not sys.stderr.isatty(),
        **settings,
    )


@contextmanager
def resumable(text: str, total: int, kept: Callable[[int], str]) -> Iterator[Callable[[], None]]:
    """Show a progress bar, and yield a function that advances it. On Ctrl-C, print ``kept(steps so far)``."""
    with bar() as progress:
        task = progress.add_task(text, total=total)
        try:
            yield lambda: progress.advance(task)
        except KeyboardInterrupt:
            progress.stop()
            done = round(progress.tasks[0].completed)
            print(f"{kept(done)}; repeat the command to resume", file=sys.stderr)
            raise


@contextmanager
def status(text: str, every: float = 10.0) -> Iterator[Callable[[str], None]]:
    """Show a status text on stderr, and yield a function that changes it.

    A terminal shows one line, erased at the end. A log gets a line now and then at most one every ``every`` seconds.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as line:
            yield line.update
        return
    last = -math.inf

    def update(text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= every:
            last = now
            print(f"{text} ...", file=sys.stderr, flush=True)

    update(text)
    yield update


def write_marked(console: Console, marked: Iterable[tuple[str, bool]]) -> None:
    """Write ``(text, is_drafted)`` pairs (`hydrajax.text.marking.pieces`) and end the line.

    Drafted text is styled on a terminal, and in brackets elsewhere.
    """
    if not console.is_terminal:
        print("".join(f"{OPEN}{text}{CLOSE}" if drafted else text for text, drafted in marked), file=console.file)
        return
    # As segments: printed as text, rich would wrap lines, expand tabs and drop some control characters.
    segments = [Segment(text, Style.parse(DRAFTED) if drafted else None) for text, drafted in marked]
    console.print(Segments([*segments, Segment.line()]), crop=False, end="")
