"""Files that cannot be read to their end, files that reach the disk before their names, and memory for weights."""

import errno
import mmap
import os
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.shapes import PRESETS
from hydrajax.errors import HydrajaxError
from hydrajax.files import LONGEST_TEXT, WholeFile, check_directory, whole_directory
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.load import load_draft
from hydrajax.host_memory import HUGE_PAGE, MADV_COLLAPSE, into_huge_pages
from hydrajax.text.tokenizer import load_tokenizer
from hydrajax.train.checkpoints import TrainCheckpoints
from hydrajax.train.metrics import TrainMetrics

READERS = {
    "config.json": [read_config, load_llama, lambda folder: load_draft(folder, PRESETS["tiny"])],
    "tokenizer_config.json": [load_llama, load_tokenizer],
    "results.json": [find_results],
}


def test_a_file_without_end_is_refused_by_name(tmp_path):
    def put_much(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(LONGEST_TEXT + 1)

    def put_device(path: Path) -> None:
        path.symlink_to("/dev/zero")

    for put, said in (
        (os.mkfifo, "expected a regular file"),
        (put_device, "expected a regular file"),
        (put_much, f"{LONGEST_TEXT + 1} bytes"),
    ):
        for name, readers in READERS.items():
            folder = tmp_path / f"{put.__name__} {name}"
            folder.mkdir()
            (folder / "tokenizer.json").write_text("{}")
            put(folder / name)
            for read in readers:
                with pytest.raises(HydrajaxError, match=f"{name} .*{said}"):
                    read(folder)


def test_links_as_the_hub_makes_them_are_files(tmp_path):
    """A snapshot of huggingface_hub is links into another folder."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_text("{}")
    (tmp_path / "snapshot" / "more").mkdir(parents=True)
    for name in ("config.json", "more/y.json"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / "x")
    (tmp_path / "snapshot" / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "snapshot" / "circle").symlink_to(tmp_path / "snapshot")
    check_directory(tmp_path / "snapshot", "base")
    os.mkfifo(tmp_path / "snapshot" / "more" / "pipe")
    with pytest.raises(HydrajaxError, match=r"^base: .*more/pipe is a pipe or a device, expected a regular file$"):
        check_directory(tmp_path / "snapshot", "base")


@pytest.fixture
def synced(monkeypatch) -> dict[int, int]:
    """The size of every file and directory, by its inode, when it was last synced."""
    sizes: dict[int, int] = {}
    real = os.fsync

    def fsync(number):
        real(number)
        sizes[os.fstat(number).st_ino] = os.fstat(number).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    return sizes


def check_synced(path: Path, synced: dict[int, int]) -> None:
    """It was synced when it held what it holds now; its inode goes with it when it gets its name."""
    found = path.stat()
    assert synced.get(found.st_ino) == found.st_size or path.is_dir(), path
    assert found.st_ino in synced, path


def test_a_whole_file(tmp_path, synced, monkeypatch):
    there = []
    monkeypatch.setattr(Path, "replace", lambda path, target: (there.append(dict(synced)), os.replace(path, target)))
    with WholeFile(path := tmp_path / "out", "--output") as file:
        file.write_text("a" * 10_000)
        file.write_text("b")
    check_synced(path, there[0])


def test_a_whole_directory(tmp_path, synced, monkeypatch):
    there = []
    monkeypatch.setattr(Path, "rename", lambda path, target: (there.append(dict(synced)), os.rename(path, target)))
    with whole_directory(tmp_path / "export", "export") as folder:
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "x").write_text("x")
        (folder / "empty").touch()
        (folder / "link").symlink_to("nowhere")
    for path in [tmp_path / "export", *(tmp_path / "export").rglob("*")]:
        if not path.is_symlink():
            check_synced(path, there[-1])


def test_a_checkpoint(tmp_path, synced):
    with TrainCheckpoints(tmp_path, keep=1, higher_is_better=True) as checkpoints:
        checkpoints.save(3, {"kernel": jnp.ones((8, 4))}, {})
    found = [path for path in (tmp_path / "3").rglob("*") if path.is_file()]
    assert "hydrajax.json" in {path.name for path in found}
    # What orbax adds when it gives the name, such as the time, can be done without.
    for path in (tmp_path / "3" / "hydrajax.json", *(tmp_path / "3" / "state").rglob("*")):
        check_synced(path, synced)


def test_metrics(tmp_path, synced):
    with TrainMetrics(tmp_path, 0, 5, Console()) as metrics:
        metrics.log(1, "train", {"loss": 2.5})
        metrics.persist()
        check_synced(tmp_path / "metrics.jsonl", synced)


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_disk_that_fails_and_one_that_cannot_say(tmp_path, monkeypatch, number, is_refused):
    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    message = f"--output: cannot write {tmp_path / 'out'}: {os.strerror(errno.EIO)}"
    refused = pytest.raises(HydrajaxError, match=f"^{message}$") if is_refused else nullcontext()
    with refused, WholeFile(tmp_path / "out", "--output") as file:
        file.write_text("a")
    assert [path.name for path in tmp_path.iterdir()] == ([] if is_refused else ["out"])


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
