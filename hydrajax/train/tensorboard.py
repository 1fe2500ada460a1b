"""A synchronous writer of TensorBoard event files.

Only tensorboardX's file format is used: its writer has a queue and a thread, which dies with a traceback on a full disk
and leaves the run waiting for the queue.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path


class TensorBoardWriter:
    """Write scalars to a new event file in ``directory``. Methods raise `OSError` if it cannot be written.

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
