"""Prompt files: plain text, or JSON lines with exactly one of ``prompt_ids``, ``prompt`` and ``turns``."""

import sys
from pathlib import Path

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import BYTE_ORDER_MARK, decoded, file_content, json_lines, objects, shown
from hydrajax.text.prompt import Prompt
from hydrajax.text.records import TEXT, Kind, list_of

FIELDS = {
    "prompt_ids": Kind(
        "a list of integers", lambda value: isinstance(value, list) and all(type(i) is int for i in value)
    ),
    "prompt": TEXT,
    "turns": Kind("a list of one or more texts", lambda value: list_of(TEXT).holds(value) and len(value) > 0),
}
STDIN = "-"
PROMPT_FORMATS = "JSON lines with prompt_ids, prompt or turns; a .txt file is one prompt; - is standard input"


def read_prompts(path: str | Path, flag: str = "prompts") -> list[Prompt]:
    """Read the prompts of a file, in order.

    A ``.txt`` file is one prompt, without the line break at its end. Any other file has JSON lines; blank lines are
    skipped. Standard input has JSON lines if its first character that is not blank is ``{``, else it is one prompt.
    Only the first of ``turns`` (MT-Bench, Spec-Bench) is used, since the others depend on the answers. Fields other
    than the three (question_id, category, reference ...) are ignored.

    Args:
        path: the file; ``-`` is standard input.

    Raises:
        HydrajaxError: naming file, line and field, for any other format.
    """
    if path == STDIN:
        name, content = "standard input", sys.stdin.buffer.read().removeprefix(BYTE_ORDER_MARK)
        plain = not content.lstrip().startswith(b"{")
    else:
        name, content = str(path), file_content(path, flag)
        plain = name.removesuffix(".gz").endswith(".txt")
    if plain and content.strip():
        text = decoded(content, f"{flag}: {name}")
        return [Prompt(text.removesuffix("\n").removesuffix("\r"), name)]  # without its last line break
    prompts = [_prompt(where, line) for where, line in objects(json_lines(content, name))]
    if not prompts:
        raise HydrajaxError(f"{flag}: {name} is empty, expected {'some text' if plain else 'a line with a prompt'}")
    return prompts


def _prompt(where: str, line: dict) -> Prompt:
    present = [field for field in FIELDS if field in line]
    if len(present) != 1:
        found = ", ".join(present or map(str, line)) or "none"
        raise HydrajaxError(f"{where}: got the fields {found}, expected exactly one of {', '.join(FIELDS)}")
    (field,) = present
    value, where = line[field], f"{where}: {field}"
    if not FIELDS[field].holds(value):
        raise HydrajaxError(f"{where}: got {shown(value)}, expected {FIELDS[field].words}")
    return Prompt(value[0], where, chat=True) if field == "turns" else Prompt(value, where)
