"""Ctrl-C and SIGTERM, also in callbacks whose exceptions Python discards; and the lines of `hydrajax chat`."""

import gc
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.programs import command
from hydrajax.cli.chat import answer, at_terminal, read_line
from hydrajax.cli.signals import Terminated, terminable
from hydrajax.conversation import Turn


@pytest.fixture(autouse=True)
def _interruptible():
    """Raise KeyboardInterrupt on SIGINT also if the tests run in the background, where a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_during_a_callback_of_the_garbage_collector_is_not_lost(number, raised):
    """JAX registers such a callback, and compilation collects garbage often."""
    calls = []

    def callback(phase, info):
        calls.append(phase)
        if len(calls) == 1:
            os.kill(os.getpid(), number)
        if len(calls) == 2:
            time.sleep(0.1)  # the signal that is sent again arrives here too

    def collect_for_seconds():
        with terminable():
            for _ in range(500):
                gc.collect(0)
                time.sleep(0.01)

    hook = sys.unraisablehook
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt) as found:
            collect_for_seconds()
    finally:
        gc.callbacks.remove(callback)
    assert found.type is raised
    assert 2 <= len(calls) < 500
    assert sys.unraisablehook is hook


def test_an_interrupted_program_does_not_wait_for_pythons_cleanup():
    """XLA's threads may still compile then, and crash."""
    code = """if True:
        import atexit, os, sys
        from hydrajax.cli import run_command
        def run(args):
            print("begun")
            raise KeyboardInterrupt
        atexit.register(os.abort)
        sys.exit(run_command("x", "", lambda parser: None, run, None))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "hydrajax: interrupted\n")


def test_other_errors_of_callbacks_are_reported(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Broken:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    with terminable():
        Broken(ZeroDivisionError())
        Broken(RuntimeError("Event loop is closed"))  # a repeated error on a full disk
        Broken(RuntimeError("Event loop is open"))
    assert [str(one.exc_value) for one in told] == ["", "Event loop is open"]


LEFT, UP, END = "\x1b[D", "\x1b[A", "\x04"


def test_lines_are_edited_and_remembered(tmp_path):
    """In a real terminal, arrows move within a line and bring the last one back."""
    pytest.importorskip("readline")
    pty = pytest.importorskip("pty")
    terminal, inside = pty.openpty()
    history = {"HOME": str(tmp_path), "TERM": "xterm", "INPUTRC": "/dev/null"}
    process = subprocess.Popen(
        command("read_lines"), stdin=inside, stdout=inside, stderr=inside, env=os.environ | history
    )
    os.close(inside)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([terminal], [], [], 60)[0], f"{text!r} is not in {shown!r}"
            shown += os.read(terminal, 1000).decode()
        shown = shown.split(text, 1)[1]

    until("> ")
    os.write(terminal, f"ac{LEFT}b\r".encode())
    until("read 'abc'")
    until("> ")
    os.write(terminal, f"{UP}d\r".encode())
    until("read 'abcd'")
    until("> ")
    os.write(terminal, END.encode())
    assert process.wait(timeout=60) == 0
    os.close(terminal)
    assert list(tmp_path.iterdir()) == []  # no file of what was said


def test_a_process_without_standard_input_is_told_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as Python has it then
    assert not at_terminal()
    assert read_line() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_ctrl_c_breaks_an_answer_off_and_sigterm_ends_the_program(error, capsys):
    closed = []

    def send(message):
        try:
            yield "the "
            raise error
        finally:
            closed.append(message)

    ends = pytest.raises(Terminated) if error is Terminated else nullcontext()
    with ends:
        answer(SimpleNamespace(send=send, turn=Turn()), "a", Console(stderr=True))
    out, err = capsys.readouterr()
    assert (out, closed) == ("the \n", ["a"])
    assert ("broken off" in err) == (error is KeyboardInterrupt)
