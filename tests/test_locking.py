"""Locks on outputs: a second process is refused, and the lock is free once its process has ended in any way."""

import errno
import os
import socket
import subprocess
import warnings

import pytest

from helpers.programs import command
from hydrajax.errors import HydrajaxError
from hydrajax.formats.directories import exported
from hydrajax.locking import NAME, in_use

fcntl = pytest.importorskip("fcntl")


def test_a_second_holder_is_refused_by_name_and_no_file_stays(tmp_path):
    with in_use(tmp_path):
        assert os.listdir(tmp_path) == [NAME]
        with pytest.raises(HydrajaxError) as error, in_use(tmp_path):
            raise AssertionError("held twice")
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        assert str(error.value) == (
            f"output: {tmp_path} is in use by {holder}: wait until it ends, or name another output"
        )
        with in_use(tmp_path / "answers.jsonl"), in_use(tmp_path / "others.jsonl"):  # each file has its own
            assert len(os.listdir(tmp_path)) == 3
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError), in_use(tmp_path):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_directory_is_the_same_output(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with in_use(tmp_path / "link"), pytest.raises(HydrajaxError), in_use(tmp_path / "run"):
        pass


def test_killed_holder(tmp_path):
    """The lock file of a killed process does not lock."""
    holder = subprocess.Popen(command("hold_lock", tmp_path), stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(HydrajaxError, match=f"in use by process {holder.pid} on"), in_use(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert os.listdir(tmp_path) == [NAME]
    with in_use(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / NAME).read_text()
    assert os.listdir(tmp_path) == []


def test_a_process_started_by_the_holder_does_not_hold_it(tmp_path):
    with in_use(tmp_path):
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        with in_use(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_the_refusal_is_one_line_for_any_content_of_the_file(tmp_path):
    for content in [b"", b"\0" * 9, b"\xff" * 3000, b"two\nlines"]:
        (tmp_path / NAME).write_bytes(content)
        file = os.open(tmp_path / NAME, os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(HydrajaxError, match="is in use by ") as error, in_use(tmp_path):
            pass
        os.close(file)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500 + len(str(tmp_path))


def test_a_file_system_without_locks_is_used_with_one_warning(tmp_path, monkeypatch):
    numbers = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]

    def flock(*_):
        raise OSError(numbers[0], os.strerror(numbers[0]))

    monkeypatch.setattr(fcntl, "flock", flock)
    while numbers:
        expected = rf"hydrajax: output: .* cannot be locked \({os.strerror(numbers[0])}\)"
        with pytest.warns(UserWarning, match=expected) as warned, in_use(tmp_path):
            pass
        assert len(warned) == 1
        del numbers[0]


def test_no_warning_where_the_lock_file_cannot_be_made(tmp_path):
    """Writing the output there fails with its own message."""
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / NAME).mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / NAME).symlink_to(tmp_path / "file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("nowhere/answers.jsonl", "file/answers.jsonl", "taken", "linked"):
            with in_use(tmp_path / name):
                pass
    assert sorted(os.listdir(tmp_path)) == ["file", "linked", "taken"]
    assert (tmp_path / "file").read_text() == ""


def test_an_export_replaces_a_directory_with_a_leftover_lock(tmp_path):
    for _ in range(2):
        with exported(tmp_path / "heads", overwrite=False) as (folder, config):
            (folder / "x").write_text("")
            config["y"] = 1
        (tmp_path / "heads" / f".searched.json{NAME}").write_text("process 1 on nowhere")
