"""One process at a time per output, so that two cannot resume the same run."""

import errno
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hydrajax.errors import HydrajaxError, one_line

NAME = ".hydrajax.lock"  # in a directory; the lock of a file is next to it and begins with its name
CANNOT_LOCK = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL


@contextmanager
def in_use(target: str | Path, what: str = "output") -> Iterator[None]:
    """Hold ``target``, a directory that exists or a file that may not, for this process.

    The operating system frees the lock when the process ends. Nothing is held, with one warning, on a file system
    without locks; nor where the lock file cannot be made, as writing the output then fails with its own message.

    Raises:
        HydrajaxError: if another process holds the target. ``what`` begins the message.
    """
    where = Path(os.path.realpath(target))
    path = where / NAME if where.is_dir() else where.with_name(f".{where.name}{NAME}")
    lock, holder = FileLock(path, blocking=False, fallback_to_soft=False), ""
    try:
        if path.parent.is_dir():  # else filelock makes it
            lock.acquire()
            with suppress(OSError):  # the lock holds on a full disk too
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        with suppress(OSError):
            holder = path.read_bytes()[:200].decode(errors="replace").strip("\0 \n")
        found = f"{target} is in use by {one_line(holder or 'another process')}"
        raise HydrajaxError(f"{what}: {found}: wait until it ends, or name another output") from None
    except OSError as error:
        if error.errno in CANNOT_LOCK:
            problem = f"{what}: {target} cannot be locked ({error.strerror})"
            warnings.warn(f"hydrajax: {problem}: make sure that no other process writes there", stacklevel=3)
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # before the release, so that it cannot remove the next holder's
                path.unlink()
            lock.release()


@contextmanager
def one_at_a_time(target: str | Path, what: str) -> Iterator[None]:
    """Wait until no other process or thread holds ``target``, then hold it. The folder of ``target`` is made if needed.

    Nothing is held on a file system without locks.
    """
    where = Path(os.path.realpath(target))
    lock = FileLock(where.with_name(f".{where.name}{NAME}"), fallback_to_soft=False)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise HydrajaxError(f"{what}: cannot write {where.parent}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()  # the file stays: a waiting process has opened it


def is_lock(path: Path) -> bool:
    """Return whether a file is a lock, by its name."""
    return path.name.startswith(".") and path.name.endswith(NAME)
