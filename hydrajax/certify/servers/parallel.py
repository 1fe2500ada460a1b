"""Several requests at once, on threads that do not delay the end of the program."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Return ``function(item)`` of all items, at most ``workers`` at once; raise the first error.

    The threads are daemons: after an error or Ctrl-C the program ends without waiting for open requests.

    Args:
        function: called on threads, with one worker on the calling thread.
        on_done: called on the calling thread after each result.
    """
    if workers == 1:
        found = []
        for item in items:
            found.append(function(item))
            on_done()
        return found
    waiting, stopped = iter(range(len(items))), threading.Event()
    done: queue.SimpleQueue[tuple[int, Result | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        for number in waiting:
            if stopped.is_set():
                return
            try:
                done.put((number, function(items[number]), None))
            except BaseException as error:  # raised on the calling thread
                done.put((number, None, error))
                return

    for _ in range(min(workers, len(items))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Result] = {}
    try:
        for _ in items:
            number, result, error = done.get()
            if error is not None:
                raise error
            results[number] = result  # type: ignore[assignment]
            on_done()
    finally:
        stopped.set()
    return [results[number] for number in range(len(items))]
