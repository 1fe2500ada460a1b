"""Which programs of a served model are compiled, and threads that compile those that requests wait for.

The batcher's thread runs compiled programs only: a compilation takes seconds, in which no other request would advance.
"""

import enum
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from hydrajax.host_memory import return_freed_memory

COMPILERS = 2  # threads: a first question waits for its prompt's program and for steps


class Kind(enum.Enum):
    """The work of a program."""

    PREFILL = "the last chunk of a prompt"
    FEED = "an earlier chunk"
    UNREAD_PREFILL = "the last chunk of a prompt that the draft does not read"
    UNREAD_FEED = "an earlier chunk of such a prompt"
    SPECULATIVE = "speculative steps"
    PLAIN = "plain steps"
    CONSTRAINED = "speculative steps under grammars"


class ProgramShape(NamedTuple):
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

    def __init__(self, compile_program: Callable[[ProgramShape], None]):
        """``compile_program`` compiles a program by running it; nothing is compiled yet."""
        self._compile = compile_program
        self._compiled: set[ProgramShape] = set()
        self._locks: dict[ProgramShape, threading.Lock] = {}
        self._wanted: dict[ProgramShape, Future] = {}
        self._worker = ThreadPoolExecutor(COMPILERS, "hydrajax compiler")

    def __contains__(self, program: ProgramShape) -> bool:
        return program in self._compiled

    def ready(self, programs: Iterable[ProgramShape]) -> bool:
        """Return whether all programs are compiled; if not, the threads compile the missing ones next.

        Raises the error of a compilation that has failed.
        """
        missing = [program for program in programs if program not in self._compiled]
        for program in missing:
            if program not in self._wanted:
                self._wanted[program] = self._worker.submit(self.compile, program)
            elif self._wanted[program].done():
                self._wanted[program].result()
        return not missing

    def compile(self, program: ProgramShape) -> None:
        """Compile a program if no other thread does or has."""
        with self._locks.setdefault(program, threading.Lock()):
            if program not in self._compiled:
                self._compile(program)
                return_freed_memory()
                self._compiled.add(program)

    def wait_for_wanted(self) -> None:
        """Wait until no request waits for a program."""
        wait(list(self._wanted.values()))

    def close(self) -> None:
        """End the threads after the programs that they compile now."""
        for future in self._wanted.values():
            future.cancel()
        self.wait_for_wanted()
        self._wanted.clear()
        self._worker.shutdown()
        self._worker = ThreadPoolExecutor(
            COMPILERS, "hydrajax compiler"
        )  # without threads until another batcher uses it
