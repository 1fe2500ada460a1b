"""The line editor of `hydrajax chat`, in a real terminal: arrows move within a line and bring the last one back."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.programs import command
from hydrajax.cli.chat import answer, at_terminal, read_line
from hydrajax.cli.signals import Terminated
from hydrajax.conversation import Turn

pytest.importorskip("readline")
pty = pytest.importorskip("pty")

LEFT, UP, END = "\x1b[D", "\x1b[A", "\x04"


def test_lines_are_edited_and_remembered(tmp_path):
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


@pytest.mark.parametrize("signal", [KeyboardInterrupt, Terminated])
def test_ctrl_c_breaks_an_answer_off_and_sigterm_ends_the_program(signal, capsys):
    closed = []

    def send(message):
        try:
            yield "the "
            raise signal
        finally:
            closed.append(message)

    ends = pytest.raises(Terminated) if signal is Terminated else nullcontext()
    with ends:
        answer(SimpleNamespace(send=send, turn=Turn()), "a", Console(stderr=True))
    out, err = capsys.readouterr()
    assert (out, closed) == ("the \n", ["a"])
    assert ("broken off" in err) == (signal is KeyboardInterrupt)
