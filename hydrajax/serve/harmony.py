"""OpenAI's harmony format, in which gpt-oss answers: messages in channels, between special tokens.

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>

The text of an answer has no special tokens; `MarkedText` has them (github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hydrajax.serve.tool_calls import CallFormat, Reading, call_in, json_rule, lark
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation

START, CHANNEL, MESSAGE, CONSTRAIN, END = (
    f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end")
)
ENDS = re.compile(r"<\|(?:end|call|return)\|>")
FUNCTION = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]+)")


class Harmony(CallFormat):
    """The format with the special tokens of one tokenizer, of gpt-oss."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    @staticmethod
    def of(template: str, tokenizer: Any) -> Harmony | None:
        """Return the format if a chat template has it."""
        found = Harmony(tokenizer)
        return found if CHANNEL in template and {CHANNEL, MESSAGE} <= set(found.special.values()) else None

    def grammar(self, tools, *, text=False, several=False, answer=None):
        """Return the grammar of thoughts and commentaries, then a call or a final message. An answer has one call."""
        ids = {name: f"<[{i}]>" for i, name in self.special.items()}

        def message(header: str, body: str) -> str:
            return f"{ids[CHANNEL]} {header} {ids[MESSAGE]} {body}"

        last = [
            message(f'"commentary to=functions.{name} " {ids[CONSTRAIN]} "json"', json_rule(schema))
            for name, schema in tools.items()
        ]
        if text or answer is not None:
            last.append(message('"final"', "TEXT?" if answer is None else json_rule(answer)))
        earlier = message('("analysis" | "commentary")', f'TEXT? {ids[END]} {ids[START]} "assistant"')
        return lark("earlier* last", [f"earlier: {earlier}", f"last: {' | '.join(last)}", "TEXT: /(.|\\n)+/"])

    def heads(self, tools):
        """Return nothing: the headers of calls and answers differ."""
        return {}

    def read(self, text, ended):
        """Return content, calls and thoughts. Commentaries for the user are content, those for other tools thoughts."""
        if MESSAGE not in text:  # not begun, or not in this format
            return Reading(ENDS.sub("", text) if ended and CHANNEL not in text else "", [])
        content, thoughts, calls = [], [], []
        for message in text.split(START):
            header, begun, body = ENDS.split(message, maxsplit=1)[0].partition(MESSAGE)
            if begun and (function := FUNCTION.search(header)):
                calls.append(call_in(function[1], body, len(body) - len(body.lstrip()))[0])
            elif begun:
                to_user = "to=" not in header and not header.partition(CHANNEL)[2].startswith("analysis")
                (content if to_user else thoughts).append(body)
        return Reading("\n".join(filter(None, content)), calls, "\n".join(filter(None, thoughts)))

    def reasoning_tokens(self, ids):
        count, header, counted = 0, [], False
        for token in ids:
            if name := self.special.get(token):
                counted, header = name == MESSAGE and self._tokenizer.decode(header).startswith("analysis"), []
            elif counted:
                count += 1
            else:
                header.append(token)
        return count


class MarkedText:
    """The text of an answer with its special tokens, or with other names of any tokens, while it grows."""

    def __init__(self, special: Mapping[int, str], after: Continuation):
        """``special``: the names of tokens; ``after``: the continuation of the prompt."""
        self._special, self._after, self._read = special, after, 0
        self._marks: list[tuple[int, int, str]] = []  # such tokens, and the characters before and up to them

    def of(self, result: Generation, text: str) -> str:
        """Return the answer's ``text``, which may end before its last tokens, with special tokens."""
        for token in result.output_ids[self._read :]:
            start = self._after.offset
            self._after.read(token)
            if name := self._special.get(token):
                self._marks.append((start, self._after.offset, name))
        self._read, found, at = len(result.output_ids), [], 0
        for start, end, name in self._marks:
            if end <= len(text):
                found += [text[at:start], name]
                at = end
        return "".join([*found, text[at:]])
