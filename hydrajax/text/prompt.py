"""Prompts and prompt files.

A file is plain text, or JSON lines each with exactly one of ``prompt_ids``, ``prompt`` and ``turns``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import BYTE_ORDER_MARK, file_content, integers, json_lines, objects, shown
from hydrajax.text.tokenizer import run_tokenizer

FIELDS = ("prompt_ids", "prompt", "turns")
STDIN = "-"
PROMPT_FORMATS = (
    f"JSON lines with {', '.join(FIELDS[:-1])} or {FIELDS[-1]}; a .txt file is one prompt; - is standard input"
)
_ONE_OF = f"exactly one of the fields {', '.join(FIELDS)} is needed"


@dataclass(frozen=True)
class Prompt:
    """What to continue, and its name in messages.

    content: text, token ids, or the messages of a conversation (``role`` and ``content`` each), which the tokenizer's
    chat template writes out up to where the next answer begins. where: such as ``"mt.jsonl line 3: turns"``. chat: the
    text is a user's message, to be wrapped in the template if there is one.
    """

    content: str | Sequence[int] | Sequence[Mapping[str, str]]
    where: str
    chat: bool = False

    def ids(self, tokenizer: Any) -> list[int]:
        """Token ids. Text gets the special tokens (BOS) that transformers gives it by default.

        tokenizer: of transformers, or None where the base has none. Raises `HydrajaxError` for text that is empty, is
        not valid Unicode or has no tokenizer, and for ids that are not integers. The vocabulary is not checked here.
        """
        if is_conversation(self.content):
            return self._conversation_ids(tokenizer)
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
            return self._chat_ids(tokenizer, [{"role": "user", "content": self.content}])
        # verbose would warn of long texts; they are refused later
        return run_tokenizer(tokenizer.encode, self.content, where=f"{self.where}: ", verbose=False)

    def _conversation_ids(self, tokenizer: Any) -> list[int]:
        for number, message in enumerate(self.content):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise HydrajaxError(
                    f"{self.where}: message {number} must have the texts role and content, found {message!r}"
                )
        if tokenizer is None or not tokenizer.chat_template:
            raise HydrajaxError(f"{self.where}: is a list of messages, but the base has no chat template; give text")
        return self._chat_ids(tokenizer, [dict(message) for message in self.content])

    def _chat_ids(self, tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
        try:
            # The template writes BOS itself, so it must be tokenised here and not as text.
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the tokenizer's author: anything may be raised
            raise HydrajaxError(f"{self.where}: the tokenizer's chat template failed: {error}") from None

    def _integer(self, item: Any) -> int:
        try:
            if isinstance(item, bool):
                raise TypeError
            return item.__index__()
        except (AttributeError, TypeError):
            raise HydrajaxError(f"{self.where}: must be a list of integers, found {item!r}") from None


OnePrompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, str]] | Prompt


def is_conversation(content: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return not isinstance(content, str) and len(content) > 0 and all(isinstance(item, Mapping) for item in content)


def read_prompts(path: str | Path, flag: str = "prompts") -> list[Prompt]:
    """The prompts of a file, in order; of standard input where ``path`` is ``-``.

    A ``.txt`` file is one prompt: its whole text but for the one line break at its end, which editors and ``echo`` put
    there. Any other file holds JSON lines, of which blank ones are skipped. Standard input is JSON lines if its first
    line that is not blank begins with ``{``, else one prompt as a ``.txt`` file is.

    Of ``turns`` (MT-Bench, Spec-Bench) only the first is taken: the later ones need the answers to the earlier ones.
    Fields other than the three (question_id, category, reference ...) are ignored. ``flag`` names the file's option
    in messages. Raises `HydrajaxError` naming file, line and field for anything else than the formats above.
    """
    if path == STDIN:
        name, content = "standard input", sys.stdin.buffer.read().removeprefix(BYTE_ORDER_MARK)
        plain = not content.lstrip().startswith(b"{")
    else:
        name, content = str(path), file_content(path, flag)
        plain = name.removesuffix(".gz").endswith(".txt")
    if plain and content.strip():
        return [Prompt(_text(content, f"{flag}: {name}"), name)]
    prompts = [_prompt(where, line) for where, line in objects(json_lines(content, name))]
    if not prompts:
        needed = "some text" if plain else "at least one line with a prompt"
        raise HydrajaxError(f"{flag}: {name} is empty, {needed} is needed")
    return prompts


def _text(content: bytes, where: str) -> str:
    """The text of a plain file, without the line break that ends it."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise HydrajaxError(f"{where} is not UTF-8 text (byte {error.start + 1} of the file)") from None
    return text.removesuffix("\n").removesuffix("\r")


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
