"""The file of what the base has written: a line per text or answer, taken up where a run was killed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.text.appended import append, keep_settings, whole_lines
from hydrajax.text.jsonl import integers, json_value

Key = tuple[int, int]  # number of the seed, turn


class Kept(NamedTuple):
    """What is needed of a line to go on after it: not the whole prompt, as there may be millions of tokens."""

    prompt: int  # checksum of its ids
    output: Int[np.ndarray, " n"]


class RecordFile:
    """A JSONL file with its settings beside it, in ``FILE.settings.json``.

    Opening it takes up what an earlier run left, but for a last line that was being written when it was killed.

    Raises `HydrajaxError` where the file cannot be written, holds records made with other ``settings`` (a JSON object)
    or has a damaged line.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        if os.path.exists(path) and not os.path.isfile(path):
            raise HydrajaxError(f"output: {path} is no regular file, the name of a file is needed")
        lines = whole_lines(self.path)
        begun = os.path.exists(path) and os.path.getsize(path) > 0  # a file of something else may be one unended line
        beside = self.path.with_name(f"{self.path.name}.settings.json")
        otherwise = "take another file, or remove it to begin again"
        keep_settings(beside, settings, f"{path} holds records", begun=begun, otherwise=otherwise)
        self._kept = dict(_read(line, f"{path} line {number}") for number, line in enumerate(lines, start=1))
        try:
            with self.path.open("ab") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
        except OSError as error:
            raise HydrajaxError(f"output: cannot write {path}: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._kept)

    def output(self, key: Key, prompt: Sequence[int]) -> list[int] | None:
        """What the file holds for a seed's turn, or None. Raises `HydrajaxError` if it answers another prompt."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.prompt != _checksum(prompt):
            number, turn = key
            raise HydrajaxError(
                f"output: {self.path}: conversation {number}, turn {turn} answers another prompt than it would have "
                "now: has the tokenizer or its template changed?"
            )
        return kept.output.tolist()

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Lines for those that the file does not hold yet; they are on disk when this returns."""
        new = [record for record in records if key_of(record) not in self._kept]
        append(self.path, new)
        for record in new:
            self._kept[key_of(record)] = _kept(record["prompt_ids"], record["output_ids"])


def key_of(record: dict[str, Any]) -> Key:
    return record["conversation"], record["turn"]


def _read(line: bytes, where: str) -> tuple[Key, Kept]:
    record = json_value(line)
    try:
        if isinstance(record, HydrajaxError):
            raise record
        integers([record["conversation"], record["turn"]], where)
        return key_of(record), _kept(*(integers(record[name], where) for name in ("prompt_ids", "output_ids")))
    except (LookupError, TypeError, OverflowError, HydrajaxError):
        raise HydrajaxError(f"output: {where}: is damaged, or no record of this program; remove the line") from None


def _kept(prompt: Sequence[int], output: Sequence[int]) -> Kept:
    return Kept(_checksum(prompt), np.array(output, np.int32))


def _checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, np.int32).tobytes())
