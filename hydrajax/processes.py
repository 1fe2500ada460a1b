"""One run on several hosts: what the main process does for all, and what all must agree on.

Every process runs the same program and holds its devices' part of every array. With one process nothing here does
anything. All functions but `is_main` must be called by every process, in the same order, from the main thread.
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
# How long a process that ends waits for the others: they may be waiting for it in the middle of a step.
SHUTDOWN_SECONDS = 30


def start() -> None:
    """Join the other processes if the environment names a coordinator; call it before the first array.

    ``JAX_COORDINATOR_ADDRESS`` is ``host:port`` of process 0. ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` need not be
    set where JAX finds them by itself (SLURM, Open MPI, TPU pods). Raises `HydrajaxError` where they make no sense.
    """
    if ADDRESS not in os.environ:
        return
    address, count, index = os.environ[ADDRESS], _number(COUNT), _number(INDEX)
    try:
        host, _, port = address.rpartition(":")
        if not host or not 0 < int(port) < 2**16:
            raise ValueError
    except ValueError:
        raise HydrajaxError(f"{ADDRESS}: must be host:port, found {address!r}") from None
    if count is not None and index is not None and index >= count:
        raise HydrajaxError(f"{INDEX}: must be below {COUNT} = {count}, found {index}")
    try:
        jax.distributed.initialize(address, count, index, shutdown_timeout_seconds=SHUTDOWN_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise HydrajaxError(f"{ADDRESS}, {COUNT}, {INDEX}: {str(error).splitlines()[0]}") from None


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise HydrajaxError(f"{name}: must be an integer from 0 up, found {text!r}")
    return int(text)


@contextmanager
def or_end() -> Iterator[None]:
    """Within, a process that cannot reach the others any more says so in one line and ends at once, with code 2.

    At once: whatever would be tidied off, such as a checkpoint that all of them write, waits for the one that is gone.
    What is left unfinished the next start removes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"hydrajax: another process of this run has ended or cannot be reached: {one_line(error)}; "
            "the same command in all of them goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)


def is_main() -> bool:
    """Whether this process writes what there is one of: metrics, messages, exported files."""
    return jax.process_index() == 0


def anywhere(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def same_everywhere(digest: bytes) -> bool:
    """Whether all processes have the same bytes (of one length)."""
    if jax.process_count() == 1:
        return True
    found = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    return bool((found == found[0]).all())


def main_does(work: Callable[[], None]) -> None:
    """Let the main process do it while the others wait. Where it raises `HydrajaxError`, every process raises one."""
    error = None
    if is_main():
        try:
            work()
        except HydrajaxError as raised:
            error = raised
    if anywhere(error is not None):
        raise error or HydrajaxError("process 0 failed, and says why")


def to_host(tree: Any) -> Any:
    """Arrays that span processes, gathered one by one as NumPy arrays; with one process, the arrays as they are."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)
