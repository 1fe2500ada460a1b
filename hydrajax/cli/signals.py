"""SIGTERM and Ctrl-C as exceptions in the main thread that cannot get lost."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RESEND_DELAY = 0.01  # seconds
# asyncio's error for the second file that orbax fails to write on a full disk. The first error has been raised.
REPEATED_ERROR = "Event loop is closed"


class Terminated(KeyboardInterrupt):
    """SIGTERM. Cleans up like Ctrl-C: half-written files, the terminal, a note on what is kept."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, unless SIGTERM already has a handler (as in training).

    Python discards exceptions raised in callbacks such as the one that JAX registers with the garbage collector. A
    signal that arrives there would be lost: `sys.unraisablehook` sees it, and sends it again.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    hook = sys.unraisablehook
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def terminate(number, frame):
        signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        raise Terminated

    def resend(lost) -> None:
        if str(lost.exc_value) == REPEATED_ERROR:
            return
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            hook(lost)
            return
        number = signal.SIGTERM if issubclass(lost.exc_type, Terminated) else signal.SIGINT
        delay, sent = RESEND_DELAY, False
        while not sent:
            if number == signal.SIGTERM:
                signal.signal(number, terminate)
            try:  # later and from another thread: raised in this callback, it would be lost again
                threading.Timer(delay, signal.pthread_kill, (threading.main_thread().ident, number)).start()
                sent = True
            except KeyboardInterrupt:  # on a busy machine the thread can be earlier than the return of `start`
                delay *= 2

    sys.unraisablehook = resend
    if is_default:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if is_default:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
