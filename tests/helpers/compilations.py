"""Detect compilations."""

import threading
from contextlib import contextmanager

import jax


@contextmanager
def compilations():
    """Yield a list of ``(function, thread)``: the names of every function compiled inside the context."""
    found = []

    def listen(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration"):
            found.append((about.get("fun_name"), threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def no_compilation():
    """Fail if anything compiles inside the context."""
    with compilations() as found:
        yield
    assert not found, found
