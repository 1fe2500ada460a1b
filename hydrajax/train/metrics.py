"""Progress bar, ``metrics.jsonl`` and TensorBoard of a run. A resumed run neither repeats nor loses a line."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, sync
from hydrajax.text.jsonl import file_content, json_lines
from hydrajax.text.records import INTEGER, TEXT, checked

FILE = "metrics.jsonl"
FIELDS = {"step": INTEGER, "kind": TEXT}  # of every line


class TrainMetrics:
    """A context manager that writes ``metrics.jsonl`` and TensorBoard events in ``directory``.

    Lines of steps after ``resumed_at`` are dropped, as these steps are repeated. Methods raise `HydrajaxError` if
    nothing can be written, such as on a full disk.
    """

    def __init__(self, directory: Path, resumed_at: int, total_steps: int, console: Console):
        path = directory / FILE
        # A new run repeats the evaluation of step 0 too.
        found = read_metrics(path, lambda reason: console.print(f"{reason}; line dropped")) if resumed_at else []
        kept = [line for line in found if line["step"] <= resumed_at]
        self._path = path
        with WholeFile(path, "output") as file:
            file.write_text("".join(json.dumps(line) + "\n" for line in kept))
        with self._written():
            self._file = path.open("a", encoding="utf-8")
            self._tensorboard = TensorBoardWriter(directory / "tensorboard", resumed_at + 1)
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            expand=True,  # a narrow terminal cuts the note only
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=resumed_at, note="")

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a line ``{"step", "kind", ...}``. Arrays become lists, and one TensorBoard curve per element."""
        values = {name: np.asarray(value).tolist() for name, value in values.items()}
        with self._written():
            self._file.write(json.dumps({"step": step, "kind": kind} | values) + "\n")
            self._file.flush()
            for name, value in values.items():
                for i, element in enumerate(value if isinstance(value, list) else [value]):
                    suffix = f"_{i}" if isinstance(value, list) else ""
                    self._tensorboard.add(f"{kind}/{name}{suffix}", element, step)
            self._tensorboard.flush()

    def persist(self) -> None:
        """Flush all lines to the disk, where they must be before the checkpoint of their step."""
        with self._written():
            sync(self._file.fileno())

    def progress(self, step: int, note: str) -> None:
        self._bar.update(self._task, completed=step, note=note)

    def message(self, message: str) -> None:
        """Print a line above the progress bar."""
        (self._bar.console if not self._bar.disable else self._console).print(message, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, error_type, *_) -> None:
        self._bar.stop()
        for writer in (self._file, self._tensorboard):
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


class TensorBoardWriter:
    """Write scalars to a new TensorBoard file in ``directory``. Methods raise `OSError` if it cannot be written.

    Only tensorboardX's file format is used: its writer has a queue and a thread, which dies with a traceback on a full
    disk and leaves the run waiting for the queue.

    Attributes:
        first_step: TensorBoard hides this and later steps of older files in the directory.
    """

    def __init__(self, directory: Path, first_step: int):
        from tensorboardX import RecordWriter  # slow to import
        from tensorboardX.proto.event_pb2 import SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = RecordWriter(str(directory / name))
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, name: str, value: float, step: int) -> None:
        from tensorboardX.summary import scalar

        self._write(step=step, summary=scalar(name, value))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **fields).SerializeToString())


class NoMetrics:
    """`TrainMetrics` of a process other than the main one: does nothing."""

    def log(self, *_) -> None: ...

    persist = progress = message = log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None: ...


def read_metrics(path: str | Path, on_damage: Callable[[str], None] | None = None) -> list[dict]:
    """Read the lines of a ``metrics.jsonl``, without a last line that was cut off. No file has no lines.

    Raises `HydrajaxError` for a damaged line, unless ``on_damage`` is given: it gets the message, and the line is
    dropped.
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
                break  # without an end: the run was killed while writing it
            if on_damage is None:
                raise
            on_damage(str(error))
    return found
