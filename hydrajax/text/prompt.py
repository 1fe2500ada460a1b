"""Prompt files: one JSON object per line, each holding exactly one of ``prompt_ids``, ``prompt`` and ``turns``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError

FIELDS = ("prompt_ids", "prompt", "turns")
_ONE_OF = f"exactly one of the fields {', '.join(FIELDS)} is needed"


@dataclass(frozen=True)
class Prompt:
    """What to continue, and its name in messages.

    content: text or token ids. where: such as ``"mt.jsonl line 3: turns"``. chat: the text is a user's message, to be
    wrapped in the tokenizer's chat template if it has one.
    """

    content: str | Sequence[int]
    where: str
    chat: bool = False

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids. Text gets the special tokens (BOS) that transformers gives it by default.

        tokenizer: of transformers, or None where the base has none. Raises `HydrajaxError` for text that is empty, is
        not valid Unicode or has no tokenizer, and for ids that are not integers. The vocabulary is not checked here.
        """
        if not isinstance(self.content, str):
            return [self._integer(item) for item in self.content]
        if not self.content:
            # Also where the tokenizer would add BOS: nothing to continue is more likely a mistake than a wish.
            raise HydrajaxError(f"{self.where}: is empty, some text is needed")
        try:
            self.content.encode()
        except UnicodeEncodeError:
            raise HydrajaxError(f"{self.where}: is not valid Unicode text (it holds a lone surrogate)") from None
        if tokenizer is None:
            raise HydrajaxError(f"{self.where}: is text, but the base has no tokenizer; give token ids (prompt_ids)")
        if self.chat and tokenizer.chat_template:
            return self._chat_ids(tokenizer)
        return tokenizer.encode(self.content, verbose=False)  # verbose would warn of long texts; they are refused later

    def _chat_ids(self, tokenizer: Any) -> list[int]:
        message = [{"role": "user", "content": self.content}]
        try:
            # The template writes BOS itself, so it must be tokenised here and not as text.
            return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the tokenizer's author: anything may be raised
            raise HydrajaxError(f"{self.where}: the tokenizer's chat template failed: {error}") from None

    def _integer(self, item: Any) -> int:
        try:
            if isinstance(item, bool):
                raise TypeError
            return item.__index__()
        except (AttributeError, TypeError):
            raise HydrajaxError(f"{self.where}: must be a list of integers, found {item!r}") from None


def read_prompts(path: str | Path, flag: str = "--prompts") -> list[Prompt]:
    """The prompts of a JSONL file, in order. Blank lines are skipped.

    Of ``turns`` (MT-Bench, Spec-Bench) only the first is taken: the later ones need the answers to the earlier ones.
    Fields other than the three (question_id, category, reference ...) are ignored. ``flag`` names the file's option
    in messages. Raises `HydrajaxError` naming file, line and field for anything else than the format above.
    """
    prompts = [_prompt(where, line) for where, line in read_jsonl(path, flag)]
    if not prompts:
        raise HydrajaxError(f"{flag}: {path} is empty, at least one line with a prompt is needed")
    return prompts


def _prompt(where: str, line: dict) -> Prompt:
    present = [field for field in FIELDS if field in line]
    if len(present) != 1:
        found = ", ".join(present or map(str, line)) or "no field"
        raise HydrajaxError(f"{where}: found {found}; {_ONE_OF}")
    (field,) = present
    value, where = line[field], f"{where}: {field}"
    if field == "prompt":
        if not isinstance(value, str):
            raise HydrajaxError(f"{where}: must be text, found {shown(value)}")
        return Prompt(value, where)
    if field == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
            raise HydrajaxError(f"{where}: must be a list of one or more texts, found {shown(value)}")
        return Prompt(value[0], where, chat=True)
    return Prompt(integers(value, where), where)


def integers(value: Any, where: str) -> list[int]:
    """``value`` if it is a list of integers; JSON's true and 1.0 are not."""
    if not isinstance(value, list):
        raise HydrajaxError(f"{where}: must be a list of integers, found {shown(value)}")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int):
            raise HydrajaxError(f"{where}: must be a list of integers, found {shown(item)} at index {index}")
    return value


def read_jsonl(path: str | Path, what: str) -> Iterator[tuple[str, dict]]:
    """``("FILE line N", object)`` of each line that is not blank; ``what`` says in messages what the file is for."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise HydrajaxError(f"{what}: no such file: {path}") from None
    except OSError as error:
        raise HydrajaxError(f"{what}: cannot read {path}: {error.strerror}") from None
    yield from json_lines(content, path)


def json_lines(content: bytes, path: str | Path) -> Iterator[tuple[str, dict]]:
    """As `read_jsonl`, of what has been read from ``path``."""
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path} line {number}"
        try:
            line = json.loads(raw.decode())
        except UnicodeDecodeError as error:
            raise HydrajaxError(f"{where}: is not UTF-8 text (byte {error.start + 1} of the line)") from None
        except (ValueError, RecursionError) as error:  # ValueError: also numbers of thousands of digits
            raise HydrajaxError(f"{where}: is not JSON: {error}; found {shown(raw.decode())}") from None
        if not isinstance(line, dict):
            raise HydrajaxError(f"{where}: must be a JSON object, found {shown(line)}")
        yield where, line


def shown(value: Any, most: int = 60) -> str:
    """A value of a file as it stands in a message: in JSON, cut short."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 3] + "..."
