"""Keep freed host memory in the process for its next arrays, return it to the kernel, or use larger pages."""

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

# mallopt(3) of glibc: parameter and value. -1 as a trim threshold disables trimming.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
KEEP = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20), (M_ARENA_MAX, 1))
MADV_COLLAPSE = 25  # of madvise(2)
HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")  # bytes


def keep_freed_memory() -> None:
    """Keep freed memory in the process, on Linux with glibc; elsewhere do nothing.

    XLA allocates a program's temporary arrays at every call. By default glibc returns arrays of this size to the kernel
    when they are freed, and each call then waits until the kernel has cleared the pages again. Call it before JAX
    starts.
    """
    if (mallopt := _of_glibc("mallopt")) is not None:
        for parameter, value in KEEP:
            mallopt(parameter, value)


def return_freed_memory() -> None:
    """Give freed memory back to the kernel, on Linux with glibc; elsewhere do nothing.

    Compilers free gigabytes that glibc keeps in the arenas of their threads.
    """
    if (malloc_trim := _of_glibc("malloc_trim")) is not None:
        malloc_trim(0)


def into_huge_pages(arrays: Iterable) -> None:
    """Move JAX arrays of CPU devices into huge pages, on Linux 6.1 and newer; elsewhere do nothing.

    A step reads all weights, faster from huge pages (`experiments/huge_pages.py`). Most distributions give these only
    to programs that ask for them.
    """
    madvise = _of_glibc("madvise")
    if madvise is None or not HUGE_PAGE.exists():
        return
    size = int(HUGE_PAGE.read_text(encoding="ascii"))
    pages = set()
    for array in arrays:
        for shard in getattr(array, "addressable_shards", ()):
            if shard.device.platform == "cpu" and shard.data.nbytes:
                first = shard.data.unsafe_buffer_pointer()
                pages.update(range(first // size, (first + shard.data.nbytes - 1) // size + 1))
    for page in pages:  # one that the kernel refuses stays as it is
        madvise(ctypes.c_void_p(page * size), ctypes.c_size_t(size), MADV_COLLAPSE)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None where it has none of this name, as musl and other systems."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
