"""One process at a time where a run is gone on with: two would mix their lines and take each other's files away.

The lock is the operating system's (flock) on a small hidden file that names who holds it. The system frees it when the
process ends, however that happens, so a file that a killed process left behind stands in nobody's way.
"""

from __future__ import annotations

import errno
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydrajax.errors import HydrajaxError, one_line

try:
    import fcntl
except ImportError:  # Windows has no flock: nothing is locked there (docs/reliability.md)
    fcntl = None  # type: ignore[assignment]

NAME = ".hydrajax.lock"  # in a directory; of a file the name behind the file's own, beside it
CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
LONGEST = 200  # characters read of who holds a lock: the file may be anything


@contextmanager
def in_use(target: str | Path, what: str = "output") -> Iterator[None]:
    """A context manager that holds ``target``, a directory that exists or a file that may not, for this process.

    Raises `HydrajaxError` at once, naming host and process, where another process holds it. ``what`` begins the
    message. A file system that cannot lock is said in one warning and nothing is held; where the lock's file cannot be
    made, as on a read-only disk, nothing is held or said either: what is to be written there says it better.
    """
    lock = _taken(_lock_file(Path(os.path.realpath(target))), f"{what}: {target}")
    try:
        yield
    finally:
        if lock is not None:
            file, path = lock
            with suppress(OSError):
                if _same(file, path):  # not where somebody has removed it, and others hold a new one
                    path.unlink()
            os.close(file)


def is_lock(path: Path) -> bool:
    """Whether a file of this name is a lock's, which holds nothing worth keeping."""
    return path.name.startswith(".") and path.name.endswith(NAME)


def _lock_file(target: Path) -> Path:
    return target / NAME if os.path.isdir(target) else target.with_name(f".{target.name}{NAME}")


def _taken(path: Path, what: str) -> tuple[int, Path] | None:
    """The open lock file and its path; None where nothing can be held."""
    if fcntl is None:
        return None
    while True:
        try:
            file = _opened(path)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(file, path):
                with suppress(OSError):  # a full disk: held without a name
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return file, path
            os.close(file)  # the holder before removed it after it was opened here: once more, with a new one
        except OSError as error:
            holder = _holder(file)
            os.close(file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                advice = "wait until it ends, or name another output"
                raise HydrajaxError(f"{what} is in use by {holder}: {advice}") from None
            if error.errno in CANNOT_LOCK:
                warnings.warn(
                    f"hydrajax: {what} cannot be locked ({error.strerror}): see that no other process writes there",
                    stacklevel=2,
                )
                return None
            raise HydrajaxError(f"{what}: cannot lock {path}: {error.strerror}") from None


def _opened(path: Path) -> int:
    # Never through a link, and without waiting for whoever writes to a pipe: the directory may be anybody's.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)  # another user's: it can be held all the same


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(file: int) -> str:
    with suppress(OSError):
        if name := os.pread(file, LONGEST, 0).decode(errors="replace").strip("\0 \n"):
            return one_line(name)
    return "another process"
