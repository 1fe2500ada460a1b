"""What commands show of their progress."""

from __future__ import annotations

from rich.console import Console

from hydrajax.cli import screen


def test_a_log_gets_a_line_at_once_and_then_one_now_and_then(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with screen.status("loading", every=10) as say:
        for now in (1.0, 9.9, 10.1, 12.0, 20.0, 20.2):
            say(f"compiling at {now}")
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "loading ...\ncompiling at 10.1 ...\ncompiling at 20.2 ...\n"


def test_a_terminal_gets_one_line_that_leaves_no_trace(capsys, monkeypatch):
    monkeypatch.setattr(screen, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True))
    with screen.status("loading") as say:
        say("compiling 3 of 7")
    found = capsys.readouterr().err
    assert "loading" in found or "compiling" in found
    assert "\n" not in found.rsplit("\x1b[2K", 1)[-1]  # the line was erased
