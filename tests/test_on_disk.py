"""A name is given to what the disk holds: else a power cut would leave an empty file under it."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, whole_directory
from hydrajax.train.checkpoints import TrainCheckpoints
from hydrajax.train.metrics import TrainMetrics


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
