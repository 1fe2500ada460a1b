"""Attacks on `chat` as a process: what nobody should say, through a pipe, and what anybody does at a terminal."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import subprocess
import time

from attacks.commands import base, done, start, text
from attacks.registry import CannotTry, Fell, Place, attack

CLOSED = "import os; os.close(0)\n"  # standard input
CONTROLLED = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # by the terminal that is standard input
CTRL_C, CTRL_D, ENTER = b"\x03", b"\x04", b"\r"
PROMPT = b"\n> "
# Seconds from the prompt until a signal is sent. Python's `input` with readline does not see one that comes in between
# before the next line: of 60 sent at once to `input("> ")` alone 15 were, of 60 sent after 0.2 seconds none.
SETTLES = 0.3
# What a program may do to a terminal, and what undoes it: hiding the cursor, and telling a paste from typing.
MODES = {"the cursor": (b"\x1b[?25l", b"\x1b[?25h"), "pasting": (b"\x1b[?2004h", b"\x1b[?2004l")}
SURROUNDINGS: tuple[dict[str, str], ...] = (
    {},
    {"LC_ALL": "C", "LANG": "C"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "utf-8:strict"},  # as in a language's own locale, such as en_US.UTF-8
    {"COLUMNS": "20"},
    {"TERM": ""},
)


def chat(place: Place) -> list:
    model = ("--base", base(place), "--draft", "lookup", "--tree", "chain-2", "--dtype", "float32")
    return ["chat", *model, "--template", "plain", "--max-new-tokens", place.random.choice((3, 40, 999))]


# --- through a pipe ---------------------------------------------------------------------------------------------------


def lines(random: random.Random) -> dict[str, bytes]:
    """What a line may hold, by what it is. All but the last are said in every conversation."""
    return {
        "a message": b"the tree",
        "nothing": b"",
        "blanks": b" \t\x0b\x0c ",
        "NUL": b"the\0tree",
        "control characters": bytes(range(1, 10)) + b"\x1b[2J\x1b]0;x\x07 tree\x7f",
        "invalid UTF-8": b"a \xff\xfe\xc3( tree",
        "half a character": "🌳".encode()[: random.randint(1, 3)],
        "an encoded surrogate": b"\xed\xa0\x80",
        "a megabyte": b"x" * 1_000_000,
        "a megabyte of words": b"tree " * 200_000,
        "CR": b"the tree\r",
        "a special token": b"a </s> <|endoftext|> <s> b",
        "turned round": "\u202e tree \u2028 \ufeff \ufffd".encode(),
        "random bytes": random.randbytes(random.randrange(1, 60)).replace(b"\n", b""),
        "reset with words": b"/reset " + random.randbytes(5).hex().encode(),
        "exit with words": b"/exit now",
        "a command that is none": b"/" + random.choice((b"", b"/", b"help", b"reset\0", b"../../etc")),
        "reset": random.choice((b"/reset", b"  /reset \t")),
        "more": text(random.randrange(99), random.randrange(1, 60)).encode(),
    }


@attack("talking through a pipe", count=10)
def piped(place: Place) -> int:
    """All lines in some order, then the end or /exit; every line is answered or refused, and the last one ends it."""
    random, said = place.random, lines(place.random)
    order = random.sample(sorted(said), len(said))
    spoken = b"\n".join(said[name] for name in order) + random.choice((b"", b"\n", b"\n/exit\nthe tree\n"))
    environment = random.choice(SURROUNDINGS)
    process = start(*chat(place), environment=environment, stdin=subprocess.PIPE)
    try:
        out, err = process.communicate(spoken, timeout=place.seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Fell(f"did not end within {place.seconds:g} seconds") from None
    what = f"{environment}, {', '.join(order)}"
    if process.returncode or b"Traceback" in err or b"hydrajax: " in err:
        raise Fell(f"{what}: exit code {process.returncode}: {err[-300:].decode(errors='replace')}")
    if not out.strip():
        raise Fell(f"{what}: nothing was answered")
    return len(said)


@attack("talking to nobody", count=4)
def nobody(place: Place) -> int:
    """Standard input is closed or empty, or the reader goes away before the first word."""
    done(start(*chat(place), first=CLOSED), place, (0, 2))
    done(start(*chat(place), stdin=subprocess.DEVNULL), place)
    process = start(*chat(place), stdin=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    process.stdin.write(b"the tree\n" * 3)
    done(process, place, (0, 128 + signal.SIGPIPE))
    return 3


# --- at a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A chat at a pseudo-terminal of so many columns. ``shown``: all that it has shown."""

    def __init__(self, arguments: list, columns: int, seconds: float):
        try:
            import fcntl
            import pty
            import termios
        except ImportError:
            raise CannotTry("there are no pseudo-terminals here") from None
        self._settings = termios.tcgetattr
        self.screen, self._inside = pty.openpty()
        fcntl.ioctl(self._inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = self._settings(self._inside)
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self._inside)
        environment = {"TERM": "xterm", "INPUTRC": os.devnull}
        self.process = start(*arguments, environment=environment, first=CONTROLLED, start_new_session=True, **ends)
        self.shown, self._until = b"", time.monotonic() + seconds

    def watch(self, seconds: float, wanted: bytes = b"", since: int = 0) -> bool:
        """Read for so long, or until this is shown beyond place ``since``. Whether it was."""
        until = min(time.monotonic() + seconds, self._until)
        while self.process.poll() is None and time.monotonic() < until:
            if select.select([self.screen], [], [], max(0, min(0.05, until - time.monotonic())))[0]:
                self.shown += os.read(self.screen, 1 << 16)
            if wanted and wanted in self.shown[since:]:
                return True
        return False

    def left(self) -> float:
        """Seconds that it may still take."""
        return self._until - time.monotonic()

    def type(self, keys: bytes) -> int:
        """The place in what is shown before anything answers to these keys."""
        os.write(self.screen, keys)
        return len(self.shown)

    def end(self, what: str) -> int:
        """The exit code as a shell reports it, once the process has ended."""
        self.watch(self.left())
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            raise Fell(f"{what}: did not end; the last it showed is {self.shown[-200:]!r}")
        while select.select([self.screen], [], [], 0)[0]:
            self.shown += os.read(self.screen, 1 << 16)
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def changed(self) -> list[str]:
        """What is not as it was before."""
        changed = [name for name, (set_, unset) in MODES.items() if self.shown.rfind(set_) > self.shown.rfind(unset)]
        return changed + ["its settings"] * (self._settings(self._inside) != self.before)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.screen)
        os.close(self._inside)


# How a conversation is ended, and with which codes: keys that are typed, or a signal that is sent.
ENDS = {
    "Ctrl-D": (CTRL_D, {0}),
    "/exit": (b"/exit" + ENTER, {0}),
    "Ctrl-C": (CTRL_C, {130}),
    "SIGTERM": (signal.SIGTERM, {143}),
    "SIGINT": (signal.SIGINT, {130}),
    "SIGHUP": (signal.SIGHUP, {129}),
    "SIGKILL": (signal.SIGKILL, {137}),
}


@attack("talking at a terminal", count=24)
def terminal(place: Place) -> None:
    """A few messages, some broken off; then an end at the prompt, or of a signal at any moment."""
    random = place.random
    seconds = place.once("talk", lambda folder: _usual_seconds(place))
    how, columns = random.choice(sorted(ENDS)), random.choice((20, 80))
    keys, codes = ENDS[how]
    what = f"{how}, {columns} columns"
    talk = Terminal(chat(place), columns, place.seconds)
    try:
        if isinstance(keys, signal.Signals) and random.random() < 0.6:
            at = random.uniform(0, seconds)
            what += f" after {at:.2f} of {seconds:.2f} s"
            if talk.watch(at, PROMPT):
                talk.type(b"the tree of" + ENTER)
                talk.watch(random.uniform(0, 1))
        else:
            at_prompt(talk, what)
            for _ in range(random.randrange(3)):
                if talk.process.poll() is None:
                    what += broken_off(talk, random) if random.random() < 0.6 else said(talk, random, what)
        before = len(talk.shown)
        if talk.process.poll() is not None:
            codes = {130}
        elif isinstance(keys, bytes):
            talk.type(keys)
        else:
            talk.process.send_signal(keys)
        if how == "SIGINT" and talk.watch(talk.left() / 2, b"broken off", before):  # it came in mid-answer
            at_prompt(talk, what, before)
            talk.type(CTRL_D)
            codes = {0}
        code = talk.end(what)
        if code not in codes:
            raise Fell(f"{what}: exit code {code}: {talk.shown[-200:]!r}")
        # While Python still imports, nobody of ours can catch it: then it is Python's own words, and the same code.
        if b"Traceback" in talk.shown and b"<frozen importlib._bootstrap>" not in talk.shown:
            raise Fell(f"{what}: a traceback: {talk.shown[-200:]!r}")
        if how not in ("SIGKILL", "SIGHUP") and (changed := talk.changed()):
            raise Fell(f"{what}: of the terminal are not as before: {', '.join(changed)}")
    finally:
        talk.close()


def at_prompt(talk: Terminal, what: str, since: int = 0) -> None:
    if not talk.watch(talk.left(), PROMPT, since):
        raise Fell(f"{what}: no prompt; the last it showed is {talk.shown[-200:]!r}")
    time.sleep(SETTLES)


def said(talk: Terminal, random: random.Random, what: str) -> str:
    message = random.choice(
        (b"the tree", b"\x1b[A\x1b[D\x1b[D heads", b"/reset", b"tree " * 99, "é🌳".encode(), b"\t\x00a")
    )
    at_prompt(talk, what, talk.type(message + ENTER))
    return f", said {message[:9]!r}"


def broken_off(talk: Terminal, random: random.Random) -> str:
    """Ctrl-C in mid-answer, while it is compiled or comes. One that comes at the next prompt ends the program."""
    since = talk.type(b"the tree grows" + ENTER)
    if not talk.watch(random.uniform(0.05, 0.5), PROMPT, since):
        talk.type(CTRL_C)
    if not talk.watch(talk.left(), PROMPT, since) and talk.process.poll() is None:
        raise Fell(f"Ctrl-C in mid-answer: no prompt; the last it showed is {talk.shown[-200:]!r}")
    time.sleep(SETTLES)
    return ", broken off"


def _usual_seconds(place: Place) -> float:
    """How long it takes to the end of a first answer."""
    began = time.monotonic()
    talk = Terminal(chat(place), 80, place.seconds)
    try:
        at_prompt(talk, "the first")
        talk.watch(place.seconds, b"tokens/s", talk.type(b"the tree of" + ENTER))
        return time.monotonic() - began
    finally:
        talk.close()
