"""TensorBoard's event files, written at once.

tensorboardX's own writer has a queue and a thread: on a full disk the thread dies, with its own words on the screen,
and the run waits for ever once the queue is full. Of it only the file's format is used here.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path


class Curves:
    """Numbers over steps, in a file of their own below ``directory``. Raises `OSError` where it cannot be written.

    first_step: TensorBoard hides what older files of the directory say of this step and later ones.
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

    def _write(self, **what) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **what).SerializeToString())
