"""Read JSON and JSONL files, in UTF-8.

Text that is not JSON is returned as a `HydrajaxError`, which strict callers raise with its position and tolerant ones
skip.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError

UNPACKED, RATIO = 64 << 20, 100  # limit of an unpacked file in bytes, and what each packed byte adds to it
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it before UTF-8 text


def file_content(path: str | Path, what: str) -> bytes:
    """Return the bytes of a text file without a byte order mark; unpack ``.gz``.

    Args:
        what: the option or setting that named it, the start of every message.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        content = _unpacked(content, f"{what}: {path}") if path.suffix == ".gz" else content
    except FileNotFoundError:
        raise HydrajaxError(f"{what}: no such file: {path}") from None
    except MemoryError:
        raise HydrajaxError(f"{what}: cannot read {path}: not enough memory") from None
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors have no strerror
        raise HydrajaxError(f"{what}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return content.removeprefix(BYTE_ORDER_MARK)


def file_text(path: str | Path, what: str) -> str:
    """Return the text of a file, see `file_content`."""
    return decoded(file_content(path, what), f"{what}: {path}")


def decoded(content: bytes, where: str) -> str:
    """Decode the content of a file; raises `HydrajaxError` if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise HydrajaxError(f"{where} is not UTF-8 text (byte {error.start + 1} of the file)") from None


def _unpacked(packed: bytes, where: str) -> bytes:
    limit = UNPACKED + RATIO * len(packed)
    with gzip.open(io.BytesIO(packed)) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise HydrajaxError(f"{where}: {len(packed)} bytes unpack to more than {limit}, which no text does")
    return content


def json_value(text: str | bytes, within: str = "line") -> Any:
    """Return the value of a JSON text; return, not raise, a `HydrajaxError` if it is not JSON.

    ``within`` is the text's part of the file for the message: a line, or the whole file.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text)
    except UnicodeDecodeError as error:
        return HydrajaxError(f"is not UTF-8 text (byte {error.start + 1} of the {within})")
    except (ValueError, RecursionError) as error:  # ValueError: numbers of thousands of digits too
        return HydrajaxError(f"is not JSON: {error}; found {shown(text.strip()[:100])}")


def json_lines(content: str | bytes, path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield ``("FILE line N", value)`` for each line that is not blank, with values as from `json_value`.

    Only a line feed ends a line: JSON texts may contain the other line separators.
    """
    for number, line in enumerate(content.split(b"\n" if isinstance(content, bytes) else "\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", json_value(line)


def objects(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, dict]]:
    """Yield the same pairs. Raises `HydrajaxError` at the first value that is not a JSON object."""
    for where, value in values:
        if isinstance(value, HydrajaxError):
            raise HydrajaxError(f"{where}: {value}")
        if not isinstance(value, dict):
            raise HydrajaxError(f"{where}: got {shown(value)}, expected a JSON object")
        yield where, value


def read_jsonl(path: str | Path, what: str) -> Iterator[tuple[str, dict]]:
    """Yield ``("FILE line N", object)`` for each line of a file; raises as `file_content` and `objects` do."""
    return objects(json_lines(file_content(path, what), path))


def shown(value: Any, most: int = 60) -> str:
    """Format a value for a message: as JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # reading it succeeded higher up the stack
        text = f"{type(value).__name__} nested too deeply to show"
    except TypeError:  # a mapping's keys are no JSON
        text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
