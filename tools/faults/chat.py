"""Faults in `chat`: malformed lines through a pipe, no standard input, signals and keys at a terminal."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import struct
import subprocess
import time

from tools.faults.commands import exit_code, expect, start, wait
from tools.faults.fixtures import base, text
from tools.faults.registry import Failure, Trial, Unsupported, fault

CLOSE_STDIN = "import os; os.close(0)\n"
SET_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # standard input controls the process
CTRL_C, CTRL_D, ENTER = b"\x03", b"\x04", b"\r"
PROMPT, INTERRUPTED = b"\n> ", b"broken off|[Ii]nterrupted"  # shown by `chat`
# Seconds from the prompt to a signal. Python's `input` with readline misses an earlier one until the next line: 15 of
# 60 sent at once to `input("> ")` alone, none of 60 sent after 0.2 seconds.
SETTLES = 0.3
# Terminal modes, with the sequences that set and reset them.
MODES = {"cursor": (b"\x1b[?25l", b"\x1b[?25h"), "bracketed paste": (b"\x1b[?2004h", b"\x1b[?2004l")}
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"LC_ALL": "C", "LANG": "C"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "utf-8:strict"},  # as in a locale such as en_US.UTF-8
    {"COLUMNS": "20"},
    {"TERM": ""},
)


def chat(trial: Trial) -> list:
    model = ("--base", base(trial), "--draft", "lookup", "--tree", "chain-2", "--dtype", "float32")
    return ["chat", *model, "--template", "plain", "--max-new-tokens", trial.random.choice((3, 40, 999))]


# --- through a pipe ---------------------------------------------------------------------------------------------------


def lines(random: random.Random) -> dict[str, bytes]:
    return {
        "message": b"the tree",
        "empty": b"",
        "blanks": b" \t\x0b\x0c ",
        "NUL": b"the\0tree",
        "control characters": bytes(range(1, 10)) + b"\x1b[2J\x1b]0;x\x07 tree\x7f",
        "invalid UTF-8": b"a \xff\xfe\xc3( tree",
        "half a character": "🌳".encode()[: random.randint(1, 3)],
        "encoded surrogate": b"\xed\xa0\x80",
        "word of a megabyte": b"x" * 1_000_000,
        "megabyte of words": b"tree " * 200_000,
        "CR": b"the tree\r",
        "special tokens": b"a </s> <|endoftext|> <s> b",
        "direction marks": "\u202e tree \u2028 \ufeff \ufffd".encode(),
        "random bytes": random.randbytes(random.randrange(1, 60)).replace(b"\n", b""),
        "reset with words": b"/reset " + random.randbytes(5).hex().encode(),
        "exit with words": b"/exit now",
        "unknown command": b"/" + random.choice((b"", b"/", b"help", b"reset\0", b"../../etc")),
        "reset": random.choice((b"/reset", b"  /reset \t")),
        "long message": text(random.randrange(99), random.randrange(1, 60)).encode(),
    }


@fault("chat-pipe", seeds=10)
def piped(trial: Trial) -> int:
    """All lines in random order: each is answered or refused, and the end of input ends the program."""
    random, content = trial.random, lines(trial.random)
    order = random.sample(sorted(content), len(content))
    stdin = b"\n".join(content[name] for name in order) + random.choice((b"", b"\n", b"\n/exit\nthe tree\n"))
    environment = random.choice(ENVIRONMENTS)
    code, out, err = wait(start(*chat(trial), environment=environment, stdin=subprocess.PIPE), trial, stdin)
    what = f"{environment}, {', '.join(order)}"
    if code or "Traceback" in err or "hydrajax: " in err:
        raise Failure(f"{what}: exit code {code}: {err[-300:]}")
    if not out.strip():
        raise Failure(f"{what}: no answer")
    return len(content)


@fault("chat-no-stdin", seeds=4)
def no_stdin(trial: Trial) -> int:
    """Standard input is closed or empty, or the reader closes the output before the first answer."""
    expect(start(*chat(trial), first=CLOSE_STDIN), trial, (0, 2))
    expect(start(*chat(trial), stdin=subprocess.DEVNULL), trial)
    process = start(*chat(trial), stdin=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    process.stdin.write(b"the tree\n" * 3)
    expect(process, trial, (0, 128 + signal.SIGPIPE))
    return 3


# --- at a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A chat at a pseudo-terminal. ``shown`` is everything that it has shown."""

    def __init__(self, arguments: list, columns: int, seconds: float):
        try:
            import fcntl
            import pty
            import termios
        except ImportError:
            raise Unsupported("no pseudo-terminals") from None
        self._settings = termios.tcgetattr
        self.screen, self._inside = pty.openpty()
        fcntl.ioctl(self._inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = self._settings(self._inside)
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self._inside)
        environment = {"TERM": "xterm", "INPUTRC": os.devnull}
        self.process = start(*arguments, environment=environment, first=SET_TERMINAL, start_new_session=True, **ends)
        self.shown, self._until = b"", time.monotonic() + seconds

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        os.close(self.screen)
        os.close(self._inside)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def left(self) -> float:
        """Seconds left of the time limit."""
        return self._until - time.monotonic()

    def watch(self, seconds: float, wanted: bytes = b"", since: int = 0) -> bool:
        """Read for some seconds or until the regex ``wanted`` matches after offset ``since``. Return whether it did."""
        until = min(time.monotonic() + seconds, self._until)
        while self.process.poll() is None and time.monotonic() < until:
            if select.select([self.screen], [], [], max(0, min(0.05, until - time.monotonic())))[0]:
                self.shown += os.read(self.screen, 1 << 16)
            if wanted and re.search(wanted, self.shown[since:]):
                return True
        return False

    def type(self, keys: bytes) -> int:
        """Send keys. Returns the offset of what is shown in response."""
        os.write(self.screen, keys)
        return len(self.shown)

    def at_prompt(self, what: str, since: int = 0) -> None:
        """Wait for a prompt."""
        if not self.watch(self.left(), PROMPT, since):
            raise Failure(f"{what}: no prompt; last shown: {self.shown[-200:]!r}")
        time.sleep(SETTLES)

    def send_message(self, random: random.Random, what: str) -> str:
        message = random.choice(
            (b"the tree", b"\x1b[A\x1b[D\x1b[D heads", b"/reset", b"tree " * 99, "é🌳".encode(), b"\t\x00a")
        )
        self.at_prompt(what, self.type(message + ENTER))
        return f", sent {message[:9]!r}"

    def interrupt(self, random: random.Random) -> str:
        """Type Ctrl-C during an answer. One that arrives at the next prompt ends the program."""
        since = self.type(b"the tree grows" + ENTER)
        if not self.watch(random.uniform(0.05, 0.5), PROMPT, since):
            self.type(CTRL_C)
        if not self.watch(self.left(), PROMPT, since) and self.process.poll() is None:
            raise Failure(f"Ctrl-C during an answer: no prompt; last shown: {self.shown[-200:]!r}")
        time.sleep(SETTLES)
        return ", interrupted"

    def end(self, what: str) -> int:
        """Wait for the end of the process. Returns its exit code."""
        self.watch(self.left())
        if self.process.poll() is None:
            self.kill()
            raise Failure(f"{what}: did not end; last shown: {self.shown[-200:]!r}")
        while select.select([self.screen], [], [], 0)[0]:
            self.shown += os.read(self.screen, 1 << 16)
        return exit_code(self.process.returncode)

    def changed(self) -> list[str]:
        """Modes and settings of the terminal that differ from the start."""
        changed = [name for name, (set_, reset) in MODES.items() if self.shown.rfind(set_) > self.shown.rfind(reset)]
        return changed + ["settings"] * (self._settings(self._inside) != self.before)


# Ways to end a conversation (keys or a signal), with the allowed exit codes.
ENDS = {
    "Ctrl-D": (CTRL_D, {0}),
    "/exit": (b"/exit" + ENTER, {0}),
    "Ctrl-C": (CTRL_C, {130}),
    "SIGTERM": (signal.SIGTERM, {143}),
    "SIGINT": (signal.SIGINT, {130}),
    "SIGHUP": (signal.SIGHUP, {129}),
    "SIGKILL": (signal.SIGKILL, {137}),
}


@fault("chat-terminal", seeds=24)
def terminal(trial: Trial) -> None:
    """Messages and interrupts, then keys at the prompt or a signal at any moment. Check exit code and terminal."""
    random = trial.random
    seconds = trial.once("chat", lambda folder: usual_seconds(trial))
    how, columns = random.choice(sorted(ENDS)), random.choice((20, 80))
    keys, codes = ENDS[how]
    what = f"{how}, {columns} columns"
    with Terminal(chat(trial), columns, trial.timeout) as talk:
        if isinstance(keys, signal.Signals) and random.random() < 0.6:
            at = random.uniform(0, seconds)
            what += f" after {at:.2f} of {seconds:.2f} s"
            if talk.watch(at, PROMPT):
                talk.type(b"the tree of" + ENTER)
                talk.watch(random.uniform(0, 1))
        else:
            talk.at_prompt(what)
            for _ in range(random.randrange(3)):
                if talk.process.poll() is None:
                    what += talk.interrupt(random) if random.random() < 0.6 else talk.send_message(random, what)
        before = len(talk.shown)
        if talk.process.poll() is not None:
            codes = {130}
        elif isinstance(keys, bytes):
            talk.type(keys)
        else:
            talk.process.send_signal(keys)
        if how == "SIGINT" and talk.watch(talk.left() / 2, INTERRUPTED, before):  # it interrupted an answer
            talk.at_prompt(what, before)
            talk.type(CTRL_D)
            codes = {0}
        code = talk.end(what)
        if code not in codes:
            raise Failure(f"{what}: exit code {code}: {talk.shown[-200:]!r}")
        # Python's own traceback during its imports cannot be prevented.
        if b"Traceback" in talk.shown and b"<frozen importlib._bootstrap>" not in talk.shown:
            raise Failure(f"{what}: a traceback: {talk.shown[-200:]!r}")
        if how not in ("SIGKILL", "SIGHUP") and (changed := talk.changed()):
            raise Failure(f"{what}: the terminal has changed: {', '.join(changed)}")


def usual_seconds(trial: Trial) -> float:
    """Seconds from the start to the end of a first answer."""
    began = time.monotonic()
    with Terminal(chat(trial), 80, trial.timeout) as talk:
        talk.at_prompt("first answer")
        talk.watch(trial.timeout, b"tokens/s", talk.type(b"the tree of" + ENTER))
        return time.monotonic() - began
