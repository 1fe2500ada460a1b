"""Huge pages: the weights of a model that decodes are in them, and stay what they are."""

import mmap
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.host_memory import HUGE_PAGE, MADV_COLLAPSE, into_huge_pages


def kernel_collapses() -> bool:
    if not HUGE_PAGE.exists():
        return False
    with mmap.mmap(-1, 3 * int(HUGE_PAGE.read_text()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room[::4096] = b"x" * len(room[::4096])
        try:
            room.madvise(MADV_COLLAPSE)
        except OSError:
            return False
    return True


def in_huge_pages(array: jax.Array) -> int:
    """Return the bytes in huge pages of the mappings that hold the array."""
    begin = array.unsafe_buffer_pointer()
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(address, 16) for address in found.groups())
            inside = low < begin + array.nbytes and begin < high
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not kernel_collapses(), reason="this kernel moves nothing into huge pages")
def test_arrays_move_into_huge_pages():
    numbers = np.random.default_rng(0).standard_normal(1 << 23, np.float32)  # 32 MB
    array, before = jnp.array(numbers, copy=True), numbers.copy()
    into_huge_pages([array, jnp.zeros(0), numbers, "no array"])
    assert in_huge_pages(array) >= 8 << 20  # all but the edges, unless the machine's memory is in small pieces
    np.testing.assert_array_equal(array, before)


def test_other_systems_do_nothing(monkeypatch):
    def madvise(*arguments):
        raise AssertionError("called")

    monkeypatch.setattr("hydrajax.host_memory._of_glibc", lambda name: madvise)
    monkeypatch.setattr("hydrajax.host_memory.HUGE_PAGE", Path("/nonexistent"))
    into_huge_pages([jnp.ones(4)])
    monkeypatch.setattr("hydrajax.host_memory._of_glibc", lambda name: None)
    into_huge_pages([jnp.ones(4)])
