"""Detect compilations."""

from __future__ import annotations

from contextlib import contextmanager

import jax


@contextmanager
def no_compilation():
    """Fail if anything compiles inside the context."""
    found = []

    def listen(event: str, seconds: float, **about) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(about)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not found
