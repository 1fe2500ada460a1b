"""What a run reports: a progress bar, JSON lines and TensorBoard, none of which a resumed run repeats or loses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, sync
from hydrajax.text.jsonl import file_content, json_lines
from hydrajax.text.records import INTEGER, TEXT, checked
from hydrajax.train.tensorboard import Curves

FILE = "metrics.jsonl"
FIELDS = {"step": INTEGER, "kind": TEXT}  # of every line


class Metrics:
    """A context manager that writes ``metrics.jsonl`` and TensorBoard events below ``directory``.

    Lines of steps after ``resumed_at`` belong to work that was lost and is done again: they are dropped. Raises
    `HydrajaxError` where nothing more can be written, such as on a full disk.
    """

    def __init__(self, directory: Path, resumed_at: int, total_steps: int, console: Console):
        path = directory / FILE
        # A run that starts anew also repeats the evaluation of step 0.
        found = read_metrics(path, lambda reason: console.print(f"{reason}; it is left out")) if resumed_at else []
        kept = [line for line in found if line["step"] <= resumed_at]
        self._path = path
        with WholeFile(path, "output") as file:
            file.write_text("".join(json.dumps(line) + "\n" for line in kept))
        with self._written():
            self._file = path.open("a", encoding="utf-8")
            self._curves = Curves(directory / "tensorboard", resumed_at + 1)
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=resumed_at, note="")

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One line ``{"step", "kind", ...}``; arrays become lists, and one curve per element in TensorBoard."""
        values = {name: np.asarray(value).tolist() for name, value in values.items()}
        with self._written():
            self._file.write(json.dumps({"step": step, "kind": kind} | values) + "\n")
            self._file.flush()
            for name, value in values.items():
                for i, element in enumerate(value if isinstance(value, list) else [value]):
                    suffix = f"_{i}" if isinstance(value, list) else ""
                    self._curves.add(f"{kind}/{name}{suffix}", element, step)
            self._curves.flush()

    def persist(self) -> None:
        """Have all lines on the disk: those up to a checkpoint must be there when it is."""
        with self._written():
            sync(self._file.fileno())

    def progress(self, step: int, note: str) -> None:
        self._bar.update(self._task, completed=step, note=note)

    def say(self, message: str) -> None:
        """A line that stays, above the bar."""
        (self._bar.console if not self._bar.disable else self._console).print(message, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, error_type, *_) -> None:
        self._bar.stop()
        for writer in (self._file, self._curves):
            try:
                with self._written():
                    writer.close()
            except HydrajaxError:
                if error_type is None:  # else the first error is the one to show
                    raise

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HydrajaxError(f"output: cannot write {self._path}: {error.strerror}") from None


class Silent:
    """`Metrics` of a process that leaves them to the main one."""

    def log(self, *_) -> None: ...

    def persist(self) -> None: ...

    def progress(self, *_) -> None: ...

    def say(self, *_) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None: ...


def read_metrics(path: str | Path, on_damage: Callable[[str], None] | None = None) -> list[dict]:
    """The lines of a ``metrics.jsonl``; none if there is no such file, and not a last line that was cut off.

    Raises `HydrajaxError` that names a damaged line; with ``on_damage``, that hears of it and the line is left out.
    """
    if not os.path.exists(path):
        return []
    content, found = file_content(path, "metrics"), []
    whole_lines = content.count(b"\n")
    for where, value in json_lines(content, path):
        try:
            found.append(checked(value, FIELDS, where))
        except HydrajaxError as error:
            if where == f"{path} line {whole_lines + 1}":
                break  # it has no end: the run was killed while it was written
            if on_damage is None:
                raise
            on_damage(str(error))
    return found
