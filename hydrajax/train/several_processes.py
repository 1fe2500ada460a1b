"""Agreement between the processes of a training run. With one process these functions do nothing.

Every process calls them, in the same order, from the main thread.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from hydrajax.errors import one_line
from hydrajax.processes import LOST


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
        todo = "repeat the command in all processes to resume from the last checkpoint"
        print(f"hydrajax: {LOST}: {one_line(error)}; {todo}", file=sys.stderr, flush=True)
        os._exit(2)


def anywhere(flag: bool) -> bool:
    """Return whether the flag is set in any process."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def same_everywhere(digest: bytes) -> bool:
    """Return whether all processes have the same bytes (of equal length)."""
    if jax.process_count() == 1:
        return True
    found = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    return bool((found == found[0]).all())


def to_host(tree: Any) -> Any:
    """Gather arrays that span processes, one by one, as NumPy arrays; with one process, return them unchanged."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)
