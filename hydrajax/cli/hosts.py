"""One command in several processes: the main one prints, and one that fails ends the others."""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple, NoReturn

import jax

from hydrajax import processes
from hydrajax.errors import one_line
from hydrajax.processes import LOST

FAILED, LEFT = "hydrajax/failed/", "hydrajax/left/"  # keys of the store, by process
POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # for a process to find the same mistake by itself, and to clean up
LEAVE_SECONDS = 10.0  # for another process to take notice
PREFIX = "hydrajax: "
# Parts of JAX's errors that another process does not cause: memory, and what XLA cannot compile.
OWN_ERRORS = ("RESOURCE_EXHAUSTED", "RET_CHECK", "INVALID_ARGUMENT", "UNIMPLEMENTED")


class End(NamedTuple):
    """How a process ends.

    Attributes:
        code: its exit code.
        line: the line or the traceback that it prints.
        lost: it could not reach another process, which may have failed.
    """

    code: int
    line: str
    lost: bool = False


def run_together(run: Callable[[], int | None], outcome: Callable[[BaseException], tuple[int, str] | None]) -> int:
    """Join the other processes and run a command in all of them; without others just run it.

    Args:
        run: the command. What it prints appears in the main process only.
        outcome: returns the exit code and the line of an error, None for a fault of the program.

    Returns:
        The exit code. After an error the process ends here, with the exit code of the main process.
    """
    processes.start()
    if jax.process_count() == 1:
        return run() or 0
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # JAX has taken it
    watch = Watch()
    try:
        with _output():
            code = run() or 0
            sys.stdout.flush()
            processes.from_main(lambda: None)  # wait for it: it may write a report after the last step
    except BaseException as error:
        watch.end(_end(error, outcome))
    watch.stop()
    return code


def _end(error: BaseException, outcome: Callable) -> End:
    """Return how an error ends the process."""
    found = outcome(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and not any(part in str(error) for part in OWN_ERRORS):
        found = 2, f"{PREFIX}{LOST}: {one_line(error)}", True
    if found is None:
        found = 1, "".join(traceback.format_exception(error)).rstrip()
    return End(*found)


@contextmanager
def _output() -> Iterator[None]:
    """Discard what is printed, except in the main process. Gloo's greeting there goes to standard error."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere:
        if not processes.is_main():
            os.dup2(nowhere.fileno(), 1)
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
            return
        own = os.dup(1)
        os.dup2(2, 1)
        buffering = 1 if os.isatty(own) else -1
        encoding = {"encoding": sys.stdout.encoding, "errors": "backslashreplace"}
        with open(own, "w", buffering, **encoding) as stdout, redirect_stdout(stdout):
            yield


class Watch:
    """Ends this process if another one of the run has failed, even while it waits for that one within a step.

    A process that fails writes so into the coordinator's store. The main process is the last to leave, since JAX aborts
    the others as soon as its coordinator is gone.
    """

    def __init__(self):
        self._stderr, self._index = sys.stderr, jax.process_index()
        self._interrupted = self._unreachable = False
        self._stopped, self._ending = threading.Event(), threading.Lock()
        threading.Thread(target=self._poll, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if (self._failed() or self._unreachable) and not self._stopped.wait(GRACE_SECONDS):
                self._interrupted = True
                _thread.interrupt_main()
                time.sleep(GRACE_SECONDS)
                self.end(None)  # the main thread does not return to Python

    def end(self, own: End | None) -> NoReturn:
        """Tell the others, print a line, and end the process.

        Args:
            own: how this process ends; None if only because of another one.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # the other thread ends the process
        others = self._failed()
        if own is not None and own.lost:
            others = others or self._wait(self._failed, 2 * GRACE_SECONDS)
        if own is not None and (self._interrupted or (own.lost and others)):
            own = None
        end = self._end_main(own, others) if processes.is_main() else self._end_other(own)
        os._exit(end.code)

    def _end_main(self, own: End | None, others: dict[int, End]) -> End:
        for index, (code, line, _) in others.items():
            own = own or End(code, f"{PREFIX}process {index}: {line.removeprefix(PREFIX)}")
        end = own or End(2, f"{PREFIX}{LOST}")
        self._tell(FAILED, json.dumps(end))
        self._print(end.line)
        self._wait(lambda: len(self._read(LEFT)) == jax.process_count() - 1)
        return end

    def _end_other(self, own: End | None) -> End:
        if own is not None:
            self._tell(FAILED, json.dumps(own))
        of_main = self._wait(lambda: self._failed().get(0))
        end = of_main or own or End(2, f"{PREFIX}{LOST}")
        if of_main is None or (own is not None and own.line != of_main.line):
            self._print((own or end).line)
        self._tell(LEFT, "")
        return end

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError, ValueError):
            print(line, end="\n" if line else "", file=self._stderr, flush=True)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _failed(self) -> dict[int, End]:
        """Return how other processes ended."""
        found = {int(index): End(*json.loads(text)) for index, text in self._read(FAILED).items()}
        return {index: end for index, end in sorted(found.items()) if index != self._index}

    def _read(self, prefix: str) -> dict[str, str]:
        try:
            found = processes.store().key_value_dir_get(prefix)
        except jax.errors.JaxRuntimeError:  # the main process has been killed
            self._unreachable, found = True, []
        return {key.removeprefix(prefix): text for key, text in found}

    def _tell(self, prefix: str, text: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            processes.store().key_value_set(f"{prefix}{self._index}", text)

    def _wait(self, find: Callable[[], Any], most: float = LEAVE_SECONDS) -> Any:
        """Return what ``find`` returns as soon as that is true, or at last after ``most`` seconds."""
        until = time.monotonic() + most
        while not (found := find()) and time.monotonic() < until and not self._unreachable:
            time.sleep(POLL_SECONDS / 5)
        return found
