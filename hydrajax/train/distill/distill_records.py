"""The output file of distillation: one line per generated text or answer, resumed after an interruption."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.bench.appended import append, keep_settings, whole_lines
from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import json_value
from hydrajax.text.records import INTEGER, checked, list_of

Key = tuple[int, int]  # index of the seed, turn
LINE = {"conversation": INTEGER, "turn": INTEGER, "prompt_ids": list_of(INTEGER), "output_ids": list_of(INTEGER)}


class ResumedRecord(NamedTuple):
    """The part of a line that resuming needs: the prompts together may have millions of tokens."""

    prompt: int  # checksum of its ids
    output: Int[np.ndarray, " n"]


class RecordFile:
    """A JSONL file, with its settings in ``FILE.settings.json``.

    Opening resumes an earlier run; a line that was being written when the run was killed is dropped.

    Raises:
        HydrajaxError: if the file cannot be written, has a damaged line, or has records made with other ``settings``
            (a JSON object).
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        if os.path.exists(path) and not os.path.isfile(path):
            raise HydrajaxError(f"output: {path} is not a regular file; choose another name")
        lines = whole_lines(self.path)
        begun = os.path.exists(path) and os.path.getsize(path) > 0  # also a foreign file without a line break
        settings_file = self.path.with_name(f"{self.path.name}.settings.json")
        otherwise = "choose another file, or remove it to start over"
        keep_settings(settings_file, settings, f"{path} holds records", begun=begun, otherwise=otherwise)
        self._records = dict(_read(line, f"{path} line {number}") for number, line in enumerate(lines, start=1))
        try:
            with self.path.open("ab") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
        except OSError as error:
            raise HydrajaxError(f"output: cannot write {path}: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._records)

    def output(self, key: Key, prompt: Sequence[int]) -> list[int] | None:
        """Return the recorded output of a seed's turn, or None. Raises `HydrajaxError` if its prompt was another."""
        found = self._records.get(key)
        if found is None:
            return None
        if found.prompt != _checksum(prompt):
            raise HydrajaxError(
                f"output: {self.path}: conversation {key[0]}, turn {key[1]} answers another prompt than now; has the "
                "tokenizer or its template changed?"
            )
        return found.output.tolist()

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Add the records that the file does not have yet; they are on disk when this returns."""
        new = [record for record in records if _key(record) not in self._records]
        append(self.path, new)
        self._records |= {_key(record): _resumed(record) for record in new}


def _read(line: bytes, where: str) -> tuple[Key, ResumedRecord]:
    try:
        record = checked(json_value(line), LINE, where)
        return _key(record), _resumed(record)
    except (OverflowError, HydrajaxError):
        raise HydrajaxError(f"output: {where}: is damaged or not from this program; remove the line") from None


def _key(record: dict[str, Any]) -> Key:
    return record["conversation"], record["turn"]


def _resumed(record: dict[str, Any]) -> ResumedRecord:
    return ResumedRecord(_checksum(record["prompt_ids"]), np.array(record["output_ids"], np.int32))


def _checksum(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, np.int32).tobytes())
