"""Text that the base has generated, as token ids: the output of `hydrajax distill` and `generate --output`."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import read_jsonl
from hydrajax.text.records import Kind, checked

IDS = Kind(
    "a list of token ids",
    lambda ids: isinstance(ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in ids),
)


class Continuation(NamedTuple):
    """A prompt and the text that the base has generated after it.

    Attributes:
        where: file and line, such as ``"out.jsonl line 3"``.
        ids: ``(prompt ids, generated ids)``.
        conversation: equal for all answers of one conversation, whose prompts contain each other.
    """

    where: str
    ids: tuple[list[int], list[int]]
    conversation: tuple[str, int | str]


def read(files: Iterable[str | Path]) -> list[Continuation]:
    """Read JSONL lines with ``prompt_ids`` and ``output_ids``; other fields are ignored."""
    found = []
    for file in files:
        for where, line in read_jsonl(file, "data.files"):
            number = line.get("conversation")  # in files of `hydrajax distill`; other lines are separate conversations
            conversation = str(file), number if type(number) is int else where
            checked(line, {"prompt_ids": IDS, "output_ids": IDS}, where)
            found.append(Continuation(where, (line["prompt_ids"], line["output_ids"]), conversation))
    if not found:
        raise HydrajaxError(f"data.files: no generation in {', '.join(map(str, files))}")
    return found
