"""Write files and directories atomically, check them by checksum, and refuse files that cannot be read to their end.

Atomic also under a power cut: data reaches the disk before its name does. The order of renames is left to the file
system's journal.
"""

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from hydrajax.errors import HydrajaxError, one_line

CHUNK = 1 << 22  # bytes per read for a checksum
TEXTS = (".json", ".jinja", ".txt", ".model", ".py")  # model files that are read at once
LONGEST_TEXT = 64 << 20  # bytes, twice the largest known tokenizer
NO_SUCH_CALL = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS  # from file systems without fsync


def user_cache(name: str) -> Path:
    """Return hydrajax's folder of this name in the user's cache: below ``$XDG_CACHE_HOME``, by default ``~/.cache``.

    Raises:
        RuntimeError: for a user without a home, as in some containers.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hydrajax" / name


def check_directory(directory: str | Path, what: str) -> None:
    """Refuse a path that is not a directory, and one with a pipe, a device or a text above `LONGEST_TEXT` bytes.

    Checks the files of the directory and of its subdirectories. ``what`` begins the message.
    """
    # os.path: pathlib raises for names that are too long and for directories without permission.
    if not os.path.isdir(directory):
        raise HydrajaxError(f"{what}: no such directory: {directory}")
    folders = [str(directory)]
    try:
        folders += [entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
        paths = [entry.path for folder in folders for entry in os.scandir(folder)]
    except OSError as error:
        raise HydrajaxError(f"{what}: cannot read {directory}: {error.strerror}") from None
    for path in paths:
        check_file(path, what)


def check_file(path: str | Path, what: str) -> None:
    """Refuse a file as `check_directory` does; a missing one passes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a dangling link fails when it is read
        return
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise HydrajaxError(f"{what}: {path} is a pipe or a device, expected a regular file")
    if found.st_size > LONGEST_TEXT and os.path.splitext(path)[1] in TEXTS:
        raise HydrajaxError(f"{what}: {path} has {found.st_size} bytes, expected at most {LONGEST_TEXT}")


def size_and_checksum(path: Path) -> list[int]:
    """Return the number of bytes and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def checksums(folder: Path, inside: str) -> dict[str, list[int]]:
    """Return `size_and_checksum` of every file in the subfolder ``inside``, by path relative to ``folder``."""
    files = sorted(path for path in (folder / inside).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): size_and_checksum(path) for path in files}


def sync(number: int) -> None:
    """Flush an open file or directory to disk, if the file system supports it."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise


def sync_all(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    if os.name == "nt":  # supports it only for files open for writing
        return
    for path in [folder, *folder.rglob("*")]:
        if path.is_symlink():
            continue
        number = os.open(path, os.O_RDONLY)
        try:
            sync(number)
        finally:
            os.close(number)


@contextmanager
def whole_directory(directory: str | Path, what: str) -> Iterator[Path]:
    """Yield a temporary directory that replaces ``directory`` at the end.

    On any error or Ctrl-C the temporary directory is removed, and ``directory`` stays as it was. ``what`` begins error
    messages; an `OSError` becomes a `HydrajaxError`.
    """
    target = Path(os.path.realpath(directory))
    partial, old = (target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_all(partial)
        if target.is_dir():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise HydrajaxError(f"{what}: cannot write {directory}: {error.strerror or one_line(error)}") from None
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)


class WholeFile:
    """A context manager that writes a file, which appears, or is replaced, only on success.

    Writes go to a hidden temporary file in the same directory, which is renamed at the end and removed on any error or
    Ctrl-C.

    Args:
        flag: start of error messages.

    Raises:
        HydrajaxError: at once if ``path`` cannot be written.
    """

    def __init__(self, path: str | Path, flag: str):
        self._path, self._flag = path, flag
        self._target = Path(os.path.realpath(path))  # a link stays, and its target is replaced
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            # Devices too: the rename would replace them.
            kind = "a directory" if os.path.isdir(self._target) else "not a regular file"
            raise HydrajaxError(f"{flag}: {str(path)!r} is {kind}, expected a file")
        if not os.path.isdir(self._target.parent):
            raise HydrajaxError(f"{flag}: cannot write {path}: no such directory: {self._target.parent}")
        self._partial = self._target.with_name(f".{self._target.name}.{os.getpid()}.tmp")
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise self._cannot_write(error) from None

    def write_text(self, text: str) -> None:
        """Write text as UTF-8 and flush it. A lone surrogate, which JSON strings may contain, is escaped."""
        self.write_bytes(text.encode("utf-8", errors="backslashreplace"))

    def write_json(self, content: Any, indent: int | None = 1) -> None:
        """Write JSON and a newline with `write_text`; ``indent`` is that of `json.dumps`."""
        self.write_text(json.dumps(content, indent=indent) + "\n")

    def write_bytes(self, content: bytes) -> None:
        """Write bytes and flush them to the operating system; they are on disk once the file has its name."""
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:  # such as a full disk
            raise self._cannot_write(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, *_) -> None:
        try:
            with self._file:
                if error_type is None:
                    sync(self._file.fileno())
            if error_type is None:
                self._partial.replace(self._target)
        except OSError as error:
            raise self._cannot_write(error) from None
        finally:
            self._partial.unlink(missing_ok=True)

    def _cannot_write(self, error: OSError) -> HydrajaxError:
        return HydrajaxError(f"{self._flag}: cannot write {self._path}: {error.strerror}")
