"""Text that the base itself has written, as token ids: what `hydrajax distill` and `generate --output` write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import read_jsonl


class Continuation(NamedTuple):
    """A prompt that the base has continued.

    where: file and line, such as ``"out.jsonl line 3"``. ids: ``(prompt ids, generated ids)``. conversation: the same
    for all answers of one conversation, which stand in each other's prompts.
    """

    where: str
    ids: tuple[list[int], list[int]]
    conversation: tuple[str, int | str]


def read(files: Iterable[str | Path]) -> list[Continuation]:
    """The lines of JSONL files with ``prompt_ids`` and ``output_ids``; other fields are ignored.

    A program has written such files, so a bad line is not left out: it raises `HydrajaxError`, as do a file that cannot
    be read and files without a line.
    """
    found = [
        Continuation(
            where, (_ids(line, "prompt_ids", where), _ids(line, "output_ids", where)), _talk(line, file, where)
        )
        for file in files
        for where, line in read_jsonl(file, "data.files")
    ]
    if not found:
        raise HydrajaxError(f"data.files: no generation in {', '.join(map(str, files))}")
    return found


def _talk(line: dict, file: str | Path, where: str) -> tuple[str, int | str]:
    """Its number in the files of `hydrajax distill`; any other line is a conversation of its own."""
    number = line.get("conversation")
    return str(file), number if type(number) is int else where


def _ids(line: dict, name: str, where: str) -> list[int]:
    ids = line.get(name)
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise HydrajaxError(f"{where}: {name} must be a list of token ids")
    return ids
