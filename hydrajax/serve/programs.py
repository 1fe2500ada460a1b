"""Which programs of a served model are compiled, and a thread that compiles those that requests wait for.

The batcher's thread runs compiled programs only: a compilation takes seconds, in which no other request would advance.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Kind(enum.Enum):
    """What a program runs."""

    PREFILL = "the last chunk of a prompt"
    FEED = "an earlier chunk"
    UNREAD_PREFILL = "the last chunk of a prompt that the draft does not read"
    UNREAD_FEED = "an earlier chunk of such a prompt"
    SPECULATIVE = "speculative steps"
    PLAIN = "plain steps"
    CONSTRAINED = "speculative steps under grammars"


class Program(NamedTuple):
    """A program, with the small ones that move sequences into and out of its batch.

    Attributes:
        kind: what it runs.
        cache_len: positions of each KV cache.
        size: batch size of steps, padded length of a chunk.
    """

    kind: Kind
    cache_len: int
    size: int


class Programs:
    """The compiled programs of a model. Methods are thread-safe."""

    def __init__(self, compile_program: Callable[[Program], None]):
        """``compile_program`` compiles a program by running it; nothing is compiled yet."""
        self._compile = compile_program
        self._compiled: set[Program] = set()
        self._compiling: set[Program] = set()
        self._wanted: list[Program] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __contains__(self, program: Program) -> bool:
        return program in self._compiled

    def ready(self, programs: Iterable[Program]) -> bool:
        """Return whether all programs are compiled; if not, the thread compiles the missing ones next.

        Raises the error of an earlier compilation.
        """
        if self._error is not None:
            raise self._error
        missing = [program for program in programs if program not in self._compiled]
        if missing:
            with self._changed:
                self._wanted += [program for program in missing if program not in self._wanted]
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hydrajax compiler", daemon=True)
                    self._thread.start()
        return not missing

    def compile(self, program: Program) -> None:
        """Compile a program if no other thread does or has."""
        with self._changed:
            self._changed.wait_for(lambda: program not in self._compiling)
            if program in self._compiled:
                return
            self._compiling.add(program)
        try:
            self._compile(program)
            self._compiled.add(program)
        finally:
            with self._changed:
                self._compiling.remove(program)
                self._changed.notify_all()

    def wait_for_wanted(self) -> None:
        """Wait until no request waits for a program."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """End the thread after the program that it compiles now."""
        with self._changed:
            self._wanted.clear()
        self.wait_for_wanted()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._wanted:
                    self._thread = None
                    self._changed.notify_all()
                    return
                program = self._wanted.pop(0)
            try:
                self.compile(program)
            except Exception as error:  # of any kind: `ready` raises it where the program is needed
                self._error = error
