"""Coordination of a run on several hosts.

Every process runs the same program and holds its devices' shards of every array. With one process these functions do
nothing. All except `is_main` must be called by every process, in the same order, from the main thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from hydrajax.errors import HydrajaxError, one_line

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# How long a process waits for the others at its end, which may be in the middle of a step.
SHUTDOWN_SECONDS = 30


def start() -> None:
    """Join the other processes if the environment names a coordinator; call it before making the first array.

    ``JAX_COORDINATOR_ADDRESS`` is ``host:port`` of process 0. ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` are optional
    on SLURM, Open MPI and TPU pods, where JAX detects them.

    Raises:
        HydrajaxError: for invalid values.
    """
    if ADDRESS not in os.environ:
        return
    address, count, index = os.environ[ADDRESS], _number(COUNT), _number(INDEX)
    try:
        host, _, port = address.rpartition(":")
        if not host or not 0 < int(port) < 2**16:
            raise ValueError
    except ValueError:
        raise HydrajaxError(f"{ADDRESS}: got {address!r}, expected host:port") from None
    if count is not None and index is not None and index >= count:
        raise HydrajaxError(f"{INDEX}: got {index}, expected less than {COUNT} = {count}")
    try:
        jax.distributed.initialize(address, count, index, shutdown_timeout_seconds=SHUTDOWN_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise HydrajaxError(f"{ADDRESS}, {COUNT}, {INDEX}: {str(error).splitlines()[0]}") from None


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise HydrajaxError(f"{name}: got {text!r}, expected an integer from 0 up")
    return int(text)


@contextmanager
def or_end() -> Iterator[None]:
    """End the process with one line and exit code 2 when it can no longer reach the others.

    It ends without cleanup, since that (such as a checkpoint that all processes write) waits for the lost process. The
    next start removes unfinished files.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"hydrajax: another process of this run has ended or cannot be reached: {one_line(error)}; "
            "repeat the command in all processes to resume from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)


def is_main() -> bool:
    """Return whether this process writes metrics, messages and exported files."""
    return jax.process_index() == 0


def anywhere(flag: bool) -> bool:
    """Return whether the flag is set in any process."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def same_everywhere(digest: bytes) -> bool:
    """Return whether all processes have the same bytes (of equal length)."""
    if jax.process_count() == 1:
        return True
    found = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    return bool((found == found[0]).all())


def main_does(work: Callable[[], None]) -> None:
    """Run ``work`` in the main process while the others wait. If it raises `HydrajaxError`, every process does."""
    error = None
    if is_main():
        try:
            work()
        except HydrajaxError as raised:
            error = raised
    if anywhere(error is not None):
        raise error or HydrajaxError("process 0 failed; see its message")


def to_host(tree: Any) -> Any:
    """Gather arrays that span processes, one by one, as NumPy arrays; with one process, return them unchanged."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)
