"""The status line of commands."""

from __future__ import annotations

import io
import re

from rich.console import Console

from hydrajax.cli import screen


def test_a_log_gets_a_line_at_once_and_then_at_most_one_per_interval(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with screen.status("loading", every=10) as update:
        for now in (1.0, 9.9, 10.1, 12.0, 20.0, 20.2):
            update(f"compiling at {now}")
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "loading ...\ncompiling at 10.1 ...\ncompiling at 20.2 ...\n"


def test_a_terminal_gets_one_line_that_leaves_no_trace(capsys, monkeypatch):
    monkeypatch.setattr(screen, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True))
    with screen.status("loading") as update:
        update("compiling 3 of 7")
    found = capsys.readouterr().err
    assert "loading" in found or "compiling" in found
    assert "\n" not in found.rsplit("\x1b[2K", 1)[-1]  # the line was erased


def test_narrow_terminals_cut_the_description_of_a_bar_only():
    for width in [60, 80, 120]:
        console = Console(file=io.StringIO(), width=width)
        bar = screen.bar()
        bar.add_task("path/to/questions.jsonl, 5 contenders, " + "long " * 30, total=2000, completed=1500)
        console.print(bar)
        line = console.file.getvalue()
        assert re.match(r"━.* 1500/2000 +-?[-:\d]+ path/to/q.*…\n$", line), line


def test_drafted_text_is_in_brackets_where_there_are_no_styles():
    out = io.StringIO()
    screen.write_marked(Console(file=out, width=20), [("a\tb", True), (" [c]" + "d" * 30, False)])
    assert out.getvalue() == "⟦a\tb⟧ [c]" + "d" * 30 + "\n"
