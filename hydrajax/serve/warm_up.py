"""Compile the programs of a server while it answers requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from hydrajax.serve.executor_pool import ExecutorPool


class WarmUp:
    """A thread that compiles every program of some pools, the most wanted first.

    A request waits only for the programs that it needs, which come first (`hydrajax.serve.programs`).

    Attributes:
        total: number of programs; those of one kind and shape count as one.
        compiled: how many of them are compiled.
    """

    def __init__(self, pools: Sequence[ExecutorPool], then: Callable[[WarmUp], None] = lambda warm_up: None):
        """Build the thread.

        Args:
            pools: their programs are compiled in turn.
            then: called by the thread at its end, unless it was stopped.
        """
        in_turn = itertools.zip_longest(*([(pool.programs, each) for each in pool.all_programs()] for pool in pools))
        self._programs = [program for programs in in_turn for program in programs if program is not None]
        self._then = then
        self.compiled, self.total = 0, len(self._programs)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hydrajax compiler", daemon=True)

    def start(self) -> WarmUp:
        self._thread.start()
        return self

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether the thread may continue: False after `stop`."""
        return not self._stop.wait(seconds)

    def stop(self) -> None:
        """End the thread after the program that it compiles now."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for programs, program in self._programs:
            programs.wait_for_wanted()
            if self._stop.is_set():
                return
            programs.compile(program)
            self.compiled += 1
        self._then(self)
