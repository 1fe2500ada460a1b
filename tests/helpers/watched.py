"""The four readers of checkpoints, watched: what they open, run and take, and whether they refuse as they should."""

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
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import eos_ids, load_llama
from hydrajax.formats.load import load_draft

SECONDS, MEGABYTES = 5, 500  # of processor time and of more memory that one case may take
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
seen: list[str] | None = None  # what Python's audit events say of the reader that runs, None while none runs


def audit(event: str, args: tuple) -> None:
    if seen is None:
        return
    if event.startswith(FORBIDDEN):
        seen.append(f"{event} {args}")
    if event == "open" and not isinstance(args[0], int):
        path, mode, flags = args
        # What took long to compile, as anything does on a busy machine, JAX keeps for the tests that follow.
        is_compiled = str(path).startswith(str(jax.config.jax_compilation_cache_dir))
        if not is_compiled and (set(mode or "") & set("wax+") or (flags or 0) & WRITING):
            seen.append(f"opens {path} to write")


class TooSlow(BaseException):
    """No reader may swallow it."""


def too_slow(*_):
    raise TooSlow


@contextmanager
def bounded():
    """Within, more than `SECONDS` of processor time (or a minute) raises, and so does an allocation of over 4 GB."""
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 60)}
    before = [signal.signal(number, too_slow) for number, _ in timers.values()]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 2**30, limits[1]))
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds, 1)  # again every second: what a destructor raises is lost
    try:
        yield
    finally:
        for timer, (number, _), handler in zip(timers, timers.values(), before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcomes(directory: Path, base: Path | None = None, dtype=jnp.float32) -> dict[str, bool]:
    """Whether each reader of this format loads the directory; it must else refuse it properly.

    The directory's name is the format's. base: of heads that know theirs.
    """
    global seen
    readers: dict[str, Callable] = {}
    if directory.name in BASES:
        readers = {"base": lambda: load_llama(directory, dtype or jnp.bfloat16, quantize=None if dtype else "int8")}
        readers |= {"fingerprint": lambda: fingerprint(directory), "eos": lambda: eos_ids(directory)}
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
            message.encode()  # no half of a surrogate pair, which no terminal prints
        finally:
            seen = None
        assert not events, events
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000
    assert sorted(directory.parent.rglob("*")) == files
    return loads


# The hook cannot be removed; without a reader running it does nothing.
sys.addaudithook(audit)
