"""Run the four checkpoint readers under supervision of opened files, executed code, resources and errors."""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp

from helpers.every_format import BASE, BASES
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.load import load_draft

SECONDS, MEGABYTES = 5, 500  # limits of CPU time and additional memory per case
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.",
    "socket.connect",
    "os.mkdir",
    "os.rename",
)
seen: list[str] | None = None  # audit events of the running reader, None without one


def audit(event: str, args: tuple) -> None:
    if seen is None:
        return
    if event.startswith(FORBIDDEN):
        seen.append(f"{event} {args}")
    if event == "open" and not isinstance(args[0], int):
        path, mode, flags = args
        # JAX caches slow compilations, which on a busy machine can be any, for later tests.
        is_compiled = str(path).startswith(str(jax.config.jax_compilation_cache_dir))
        if not is_compiled and (set(mode or "") & set("wax+") or (flags or 0) & WRITING):
            seen.append(f"opens {path} to write")


class TooSlow(BaseException):
    """An exception that no reader may catch."""


def too_slow(*_):
    raise TooSlow


@contextmanager
def bounded():
    """Raise inside the context after `SECONDS` of CPU time or a minute, and on allocations of over 4 GB."""
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 60)}
    before = [signal.signal(number, too_slow) for number, _ in timers.values()]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 2**30, limits[1]))
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds, 1)  # repeated every second, because exceptions in destructors are lost
    try:
        yield
    finally:
        for timer, (number, _), handler in zip(timers, timers.values(), before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcomes(directory: Path, base: Path | None = None, dtype=jnp.float32) -> dict[str, bool]:
    """Return whether each reader of this format loads the directory; otherwise it must raise the right error.

    The directory is named after the format. base: the base of heads that record it.
    """
    global seen
    readers: dict[str, Callable] = {}
    if directory.name in BASES:
        readers = {"base": lambda: load_llama(directory, dtype or jnp.bfloat16, quantize=None if dtype else "int8")}
        readers |= {"fingerprint": lambda: fingerprint(directory), "eos": lambda: Checkpoint(directory).eos_ids}
    if directory.name not in BASES or directory.name == "medusa_2":
        readers["draft"] = lambda: load_draft(directory, BASE, dtype, base_directory=base)
    loads, files = {}, sorted(directory.parent.rglob("*"))
    for name, reader in readers.items():
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen = events = []
        try:
            with bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's of overflow, torch's of old pickles
                reader()
            loads[name] = True
        except HydrajaxError as error:
            message, loads[name] = str(error), False
            assert len(message.splitlines()) == 1, message
            message.encode()  # lone surrogates cannot be printed
        finally:
            seen = None
        assert not events, events
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000
    assert sorted(directory.parent.rglob("*")) == files
    return loads


# The hook cannot be removed; it does nothing unless a reader runs.
sys.addaudithook(audit)
