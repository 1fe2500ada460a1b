"""Reading files of JSON and of JSON lines: the one place for it, strict or tolerant as the caller needs.

A value that is not JSON comes out as a `HydrajaxError` that says what is wrong with it. A strict caller raises it with
the value's place; a tolerant one puts it aside and goes on. All files are UTF-8.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import CHUNK

UNPACKED, PACKED_TO = 64 << 20, 100  # bytes that any packed file may have, and more for each byte of the packed one
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors put before UTF-8 text


def file_content(path: str | Path, what: str) -> bytes:
    """The bytes of a text file, unpacked where its name ends in ``.gz``, without a byte order mark.

    Raises `HydrajaxError` where the file cannot be read, or unpacks to more than any text does; ``what`` says in the
    message which option or setting named it.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        content = _unpacked(content, f"{what}: {path}") if path.suffix == ".gz" else content
    except FileNotFoundError:
        raise HydrajaxError(f"{what}: no such file: {path}") from None
    except MemoryError:
        raise HydrajaxError(f"{what}: cannot read {path}: it takes more memory than there is") from None
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors have no strerror
        raise HydrajaxError(f"{what}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return content.removeprefix(BYTE_ORDER_MARK)


def _unpacked(packed: bytes, where: str) -> bytes:
    most, parts, size = UNPACKED + PACKED_TO * len(packed), [], 0
    with gzip.open(io.BytesIO(packed)) as file:
        while part := file.read(CHUNK):
            parts.append(part)
            size += len(part)
            if size > most:
                raise HydrajaxError(f"{where}: {len(packed)} bytes unpack to more than {most}, which no text does")
    return b"".join(parts)


def json_value(text: str | bytes, within: str = "line") -> Any:
    """The value that the text stands for, or (returned, not raised) the `HydrajaxError` that says why there is none.

    within: what the text is of a file, for the message: a line, or the whole file.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text)
    except UnicodeDecodeError as error:
        return HydrajaxError(f"is not UTF-8 text (byte {error.start + 1} of the {within})")
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of thousands of digits
        return HydrajaxError(f"is not JSON: {error}; found {shown(text.strip()[:100])}")


def json_lines(content: str | bytes, path: str | Path) -> Iterator[tuple[str, Any]]:
    """``("FILE line N", value)`` of each line that is not blank, values as from `json_value`.

    Lines end in a line feed and nothing else: JSON may hold the other characters that end lines.
    """
    for number, line in enumerate(content.split(b"\n" if isinstance(content, bytes) else "\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", json_value(line)


def objects(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, dict]]:
    """``(where, value)`` as they come. Raises `HydrajaxError` at the first value that is not a JSON object."""
    for where, value in values:
        if isinstance(value, HydrajaxError):
            raise HydrajaxError(f"{where}: {value}")
        if not isinstance(value, dict):
            raise HydrajaxError(f"{where}: must be a JSON object, found {shown(value)}")
        yield where, value


def read_jsonl(path: str | Path, what: str) -> Iterator[tuple[str, dict]]:
    """``("FILE line N", object)`` of each line of a file; raises as `file_content` and `objects` do."""
    return objects(json_lines(file_content(path, what), path))


def integers(value: Any, where: str) -> list[int]:
    """``value`` if it is a list of integers; JSON's true and 1.0 are not."""
    return _list_of("integers", value, where, lambda item: isinstance(item, int))


def numbers(value: Any, where: str) -> list[float]:
    """``value`` if it is a list of finite numbers; JSON's true is none."""
    return _list_of("numbers", value, where, lambda item: isinstance(item, (int, float)) and math.isfinite(item))


def _list_of(kind: str, value: Any, where: str, fits: Callable[[Any], bool]) -> list:
    if not isinstance(value, list):
        raise HydrajaxError(f"{where}: must be a list of {kind}, found {shown(value)}")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not fits(item):
            raise HydrajaxError(f"{where}: must be a list of {kind}, found {shown(item)} at index {index}")
    return value


def shown(value: Any, most: int = 60) -> str:
    """A value of a file as it stands in a message: as JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # what could just be read nests too deeply to be written from further down the stack
        text = f"{type(value).__name__} that nests too deeply to be shown"
    return text if len(text) <= most else text[: most - 3] + "..."
