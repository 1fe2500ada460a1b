"""Reuse of freed host memory by programs on a CPU."""

from __future__ import annotations

import ctypes
import sys

# mallopt(3) of glibc: parameter and value. -1 as a trim threshold disables trimming.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
KEEP = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20), (M_ARENA_MAX, 1))


def keep_freed_memory() -> None:
    """Keep freed memory in the process, on Linux with glibc; elsewhere do nothing.

    XLA allocates a program's temporary arrays at every call. By default glibc returns arrays of this size to the kernel
    when they are freed, and each call then waits until the kernel has cleared the pages again. On two cores, a forward
    pass of 4,096 tokens through a model of 135M parameters took 1.5 to 2.2 times as long. Call it before JAX starts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        for parameter, value in KEEP:
            mallopt(parameter, value)
