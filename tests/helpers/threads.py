"""Call a function from several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(call: Callable[[], Any], count: int = 4) -> list[Any]:
    """Return the results in the order in which the threads end; an error in a thread leaves out its result."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
