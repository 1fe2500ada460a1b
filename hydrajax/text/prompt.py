"""Prompts: text, token ids, or the messages of a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.text.tokenizer import run_tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt and its source.

    Attributes:
        content: text, token ids, or the messages of a conversation (``role`` and ``content`` each).
        where: source, the start of error messages, such as ``"mt.jsonl line 3: turns"``.
        chat: the text is a user's message, to be wrapped in the chat template if there is one.
    """

    content: str | Sequence[int] | Sequence[Mapping[str, str]]
    where: str
    chat: bool = False

    def ids(self, tokenizer: Any, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Text gets the special tokens (BOS) that transformers adds by default.

        Args:
            tokenizer: of transformers; None if the base has none.
            add_special_tokens: False encodes text without these.

        Raises:
            HydrajaxError: for text that is empty, is not valid Unicode or has no tokenizer, and for ids that are not
                integers. The vocabulary is not checked here.
        """
        if is_conversation(self.content):
            return self._conversation_ids(tokenizer)
        if not isinstance(self.content, str):
            return [self._integer(item) for item in items(self.content, self.where, "text, token ids or messages")]
        if not self.content:
            # Refused even if the tokenizer adds BOS: an empty prompt is most likely a mistake.
            raise HydrajaxError(f"{self.where}: is empty, expected some text")
        try:
            self.content.encode()
        except UnicodeEncodeError:
            raise HydrajaxError(f"{self.where}: is not valid Unicode text (it contains a lone surrogate)") from None
        if tokenizer is None:
            raise HydrajaxError(f"{self.where}: got text, but the base has no tokenizer; give token ids (prompt_ids)")
        if self.chat and tokenizer.chat_template:
            return self._chat_ids(tokenizer, [{"role": "user", "content": self.content}])
        # verbose: no warning for long texts, which are refused later
        options = {"verbose": False, "add_special_tokens": add_special_tokens}
        return run_tokenizer(tokenizer.encode, self.content, where=f"{self.where}: ", **options)

    def _conversation_ids(self, tokenizer: Any) -> list[int]:
        for number, message in enumerate(self.content):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise HydrajaxError(f"{self.where}: message {number}: got {message!r}, expected texts role and content")
        if tokenizer is None or not tokenizer.chat_template:
            raise HydrajaxError(
                f"{self.where}: got messages, but the base has no chat template; "
                "give text, or use m.chat(template='plain')"
            )
        return self._chat_ids(tokenizer, [dict(message) for message in self.content])

    def _chat_ids(self, tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
        from hydrajax.text.templates import readable_messages, run_template  # for conversations alone

        render = partial(run_template, tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
        try:
            # The template writes BOS itself, so the text must not be tokenised on its own.
            ids = render(readable_messages(partial(render, tokenize=False), messages))
        except HydrajaxError as error:  # here the template is never a built-in one
            message = str(error).replace("the chat template", "the tokenizer's chat template", 1)
            raise HydrajaxError(f"{self.where}: {message}") from None
        if not ids:
            raise HydrajaxError(f"{self.where}: the chat template writes an empty text, expected some text")
        return ids

    def _integer(self, item: Any) -> int:
        try:
            if isinstance(item, bool):
                raise TypeError
            return item.__index__()
        except (AttributeError, TypeError):
            raise HydrajaxError(f"{self.where}: got {item!r}, expected a list of integers") from None


OnePrompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, str]] | Prompt


def is_conversation(content: Any) -> bool:
    """Return whether a prompt is a list of messages."""
    several = isinstance(content, Sequence) and not isinstance(content, str) and len(content) > 0
    return several and all(isinstance(item, Mapping) for item in content)


def refuse_mapping(content: Any, where: str, expected: str) -> None:
    """Raise `HydrajaxError` for a mapping or table, whose items would be its keys, such as a tokenizer's result."""
    if callable(getattr(content, "keys", None)) and not hasattr(content, "dtype"):
        todo = "; pass its input_ids" if "input_ids" in [*content.keys()] else ""
        raise HydrajaxError(f"{where}: got a mapping ({type(content).__name__}), expected {expected}{todo}")


def items(content: Any, where: str, expected: str) -> list:
    """Return the items of a list or array; raises `HydrajaxError` for anything else, for bytes, sets and mappings."""
    refuse_mapping(content, where, expected)
    try:
        if isinstance(content, (bytes, bytearray, memoryview, set, frozenset)):
            raise TypeError
        return list(content)
    except TypeError:
        raise HydrajaxError(f"{where}: got {one_line(repr(content), 60)}, expected {expected}") from None
