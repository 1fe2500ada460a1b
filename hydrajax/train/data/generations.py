"""Text that the base itself has written, as token ids: the files that `hydrajax generate --output` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hydrajax.errors import HydrajaxError


class Generation(NamedTuple):
    """``where`` is file and line; ``ids`` are ``(prompt ids, generated ids)``."""

    where: str
    ids: tuple[list[int], list[int]]


def read(files: Iterable[str | Path]) -> list[Generation]:
    """The lines of JSONL files with ``prompt_ids`` and ``output_ids``; other fields are ignored.

    Such files are written by a program, so a bad line is an error. Raises `HydrajaxError` for one, naming it.
    """
    found = []
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise HydrajaxError(f"data.files: cannot read {file}: {getattr(error, 'strerror', error)}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(Generation(f"{file} line {number}", _ids(line, f"{file} line {number}")))
    if not found:
        raise HydrajaxError(f"data.files: no generation in {', '.join(map(str, files))}")
    return found


def _ids(line: str, where: str) -> tuple[list[int], list[int]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HydrajaxError(f"{where}: is not JSON: {error}") from None
    fields = [record.get(name) if isinstance(record, dict) else None for name in ("prompt_ids", "output_ids")]
    for name, ids in zip(("prompt_ids", "output_ids"), fields, strict=True):
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise HydrajaxError(f"{where}: {name} must be a list of token ids")
    return fields[0], fields[1]
