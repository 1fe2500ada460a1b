"""Writing a file or a directory whole or not at all, and telling whether a file is what was written.

Whole also after a power cut: a name is given to what has reached the disk. That a rename is not overtaken by what was
done after it is left to the file system, as journals keep their order.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from hydrajax.errors import HydrajaxError, one_line

CHUNK = 1 << 22  # bytes read at a time for a checksum
TEXTS = (".json", ".jinja", ".txt", ".model", ".py")  # of a model's files, those that are read whole
LONGEST_TEXT = 64 << 20  # bytes: twice the largest tokenizer that is known
NO_SUCH_CALL = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS  # of file systems that cannot be told to write something now


def check_directory(directory: str | Path, what: str) -> None:
    """Refuse what is not a directory, or one with a file that cannot be read to its end.

    Such are a pipe that nobody writes to, a device, a link to one of them, and a text of more than `LONGEST_TEXT`
    bytes. Files are looked at in the directory itself and in its folders, so by every library that reads there.
    """
    # By os.path: pathlib raises for a name too long or a directory one may not enter.
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
    """Refuse a file that cannot be read to its end, as `check_directory` does of each; there may be none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a link to nowhere: whoever needs it says so
        return
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise HydrajaxError(f"{what}: {path} is no regular file, but a pipe or a device")
    if found.st_size > LONGEST_TEXT and os.path.splitext(path)[1] in TEXTS:
        raise HydrajaxError(f"{what}: {path} has {found.st_size} bytes, allowed are {LONGEST_TEXT} of such a file")


def size_and_checksum(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def checksums(folder: Path, inside: str) -> dict[str, list[int]]:
    """`size_and_checksum` of every file in a subfolder of ``folder``, by its path in ``folder``."""
    files = sorted(path for path in (folder / inside).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): size_and_checksum(path) for path in files}


def sync(number: int) -> None:
    """Return when what was written to this open file or directory is on its disk, where the file system can say so."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise


def sync_all(folder: Path) -> None:
    """`sync` of every file in a folder and in its folders, and of these."""
    if os.name == "nt":  # which can do this only for files that are open for writing
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
    """A context manager that gives a temporary sibling of ``directory`` to fill.

    At the end it is renamed to ``directory``, which is replaced with all that is in it. On any error or Ctrl-C it is
    removed instead and what was there before stays. ``what`` begins the messages: an `OSError` becomes `HydrajaxError`.
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
    """A context manager that writes to ``path``, which appears, or is replaced, only on success.

    What is written goes to a hidden temporary file in the same directory, flushed at each write; it is renamed at the
    end and removed on any error or Ctrl-C. Raises `HydrajaxError` at once if ``path`` cannot be written. ``flag`` names
    the file's option in messages.
    """

    def __init__(self, path: str | Path, flag: str):
        self._path, self._flag = path, flag
        self._target = Path(os.path.realpath(path))  # a link keeps pointing to the file it names
        # os.path and not pathlib, whose questions raise for a name too long or a directory one may not enter.
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            # Not a device either: the rename would replace it.
            kind = "a directory" if os.path.isdir(self._target) else "not a regular file"
            raise HydrajaxError(f"{flag}: {str(path)!r} is {kind}, the name of a file is needed")
        if not os.path.isdir(self._target.parent):
            raise HydrajaxError(f"{flag}: cannot write {path}: no such directory: {self._target.parent}")
        self._partial = self._target.with_name(f".{self._target.name}.{os.getpid()}.tmp")
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise self._cannot_write(error) from None

    def write_text(self, text: str) -> None:
        """Add text, in UTF-8; the system has it when this returns.

        Half of a surrogate pair, which is no text but which JSON can name, becomes an escape that JSON knows.
        """
        self.write_bytes(text.encode("utf-8", errors="backslashreplace"))

    def write_bytes(self, content: bytes) -> None:
        """Add bytes; the system has them when this returns, and the disk when the file has its name."""
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
