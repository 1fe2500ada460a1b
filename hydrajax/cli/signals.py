"""What SIGTERM and Ctrl-C do to a command: an exception in the main thread, which must not get lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOMENT = 0.01  # seconds
# What asyncio says where the second of orbax's files fails on a full disk: the error of the first has been raised.
LATE = "Event loop is closed"


class Terminated(KeyboardInterrupt):
    """SIGTERM: what Ctrl-C leaves tidy (half-written files, the terminal, a word about what is kept) this does, too."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated` where it would end the process; training has a handler of its own.

    Python throws away what is raised while it runs a callback that nobody waits for, such as the one that JAX hangs on
    the garbage collector: a signal at that moment would be without effect. Python says so to `sys.unraisablehook`,
    which sends such a signal once more.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers, and gets all signals
        yield
        return
    before, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    ours = before is signal.SIG_DFL

    def terminate(number, frame):
        signal.signal(number, signal.SIG_IGN)  # once: the second of an impatient system must not break the tidying off
        raise Terminated

    def send_again(lost) -> None:
        if str(lost.exc_value) == LATE:
            return
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            hook(lost)
            return
        number = signal.SIGINT
        if issubclass(lost.exc_type, Terminated):
            number = signal.SIGTERM
            signal.signal(number, terminate)
        # Later, and by another thread: raised in here it would be lost again.
        threading.Timer(MOMENT, signal.pthread_kill, (threading.main_thread().ident, number)).start()

    sys.unraisablehook = send_again
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
