"""One command in several processes: the main one prints, and one that fails ends the others."""

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
from typing import NoReturn

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


def run_together(run: Callable[[], int | None], outcome: Callable[[BaseException], tuple[int, str] | None]) -> int:
    """Join the other processes, run a command in all of them, and return its exit code; only the main one prints.

    ``outcome`` returns the exit code and the line of an error, None for a fault of the program; the process ends here.
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
        if isinstance(error, jax.errors.JaxRuntimeError) and not any(part in str(error) for part in OWN_ERRORS):
            watch.end(2, f"{PREFIX}{LOST}: {one_line(error)}", lost=True)
        watch.end(*(outcome(error) or (1, "".join(traceback.format_exception(error)).rstrip())))
    watch.stop()
    return code


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

    A process that fails writes so into the coordinator's store; JAX itself would notice after minutes. The main process
    is the last to leave, since JAX aborts the others as soon as its coordinator is gone.
    """

    def __init__(self):
        self._stderr, self._interrupted = sys.stderr, False
        self._stopped, self._ending = threading.Event(), threading.Lock()
        threading.Thread(target=self._poll, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if self._others() and not self._stopped.wait(GRACE_SECONDS):
                self._interrupted = True
                _thread.interrupt_main()
                time.sleep(GRACE_SECONDS)
                self.end(2, f"{PREFIX}{LOST}")  # the main thread does not return to Python

    def end(self, code: int, line: str, lost: bool = False) -> NoReturn:
        """Tell the others, print a line, and end the process; with another one's code and line if that is the cause.

        ``lost``: this process could not reach another one, which may have failed.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # the other thread ends the process
        if lost:
            self._wait(self._others, 2 * GRACE_SECONDS)
        others = self._others() if lost or self._interrupted else {}
        if others:
            index = min(others)
            code, line = others[index]
            line = f"{PREFIX}process {index}: {line.removeprefix(PREFIX)}"
        else:
            self._tell(FAILED, json.dumps((code, line)))
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError, ValueError):
            print(line, end="\n" if line else "", file=self._stderr, flush=True)
        self._tell(LEFT, "")
        if processes.is_main():
            self._wait(lambda: len(self._read(LEFT)) == jax.process_count(), LEAVE_SECONDS)
        os._exit(code)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _others(self) -> dict[int, tuple[int, str]]:
        """Return the exit codes and the lines of other processes that have failed by themselves."""
        return {index: json.loads(text) for index, text in self._read(FAILED).items() if index != jax.process_index()}

    def _read(self, prefix: str) -> dict[int, str]:
        try:
            found = processes.store().key_value_dir_get(prefix)
        except jax.errors.JaxRuntimeError:  # the main process has been killed; JAX ends this one
            return {}
        return {int(key.removeprefix(prefix)): text for key, text in found}

    def _tell(self, prefix: str, text: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            processes.store().key_value_set(f"{prefix}{jax.process_index()}", text)

    @staticmethod
    def _wait(find: Callable[[], object], most: float) -> None:
        """Wait until ``find`` returns something true, at most ``most`` seconds."""
        until = time.monotonic() + most
        while not find() and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 5)
