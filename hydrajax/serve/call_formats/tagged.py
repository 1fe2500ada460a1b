"""Calls between tags: Hermes and Qwen, and the base of other formats with tags."""

import re
from collections.abc import Collection, Mapping
from typing import ClassVar

from hydrajax.serve.tool_calls import (
    HEAD,
    Call,
    CallFormat,
    Reading,
    Schema,
    bodies,
    call_in,
    json_rule,
    lark,
    literal,
    with_tokens,
    without_begin,
)


class TaggedCalls(CallFormat):
    """Calls of Hermes and Qwen: ``<tool_call>``, a JSON object with ``name`` and ``arguments``, ``</tool_call>``.

    Attributes:
        TAG, END: before and after a call.
        MARKS: all texts of the format that may be tokens.
    """

    TAG, END = "<tool_call>", "</tool_call>"
    MARKS: ClassVar[tuple[str, ...]] = (TAG, END)

    def __init__(self, added: Mapping[str, int], special: Collection[str] = ()):
        """Read which marks are tokens.

        Args:
            added: ids of the added tokens that are not part of other texts.
            special: those among them that decoding leaves out.
        """
        self.special = {added[mark]: mark for mark in self.MARKS if mark in special}
        self._marks = {mark: literal(mark, added) for mark in self.MARKS}
        self._tag, self._tokens = self._marks[self.TAG], added.keys() & self.MARKS
        self._others = [i for text, i in added.items() if text not in self.MARKS and text not in special]

    def calls(self, tools: Mapping[str, Schema], several: bool) -> tuple[str, list[str]]:
        """Return what follows the first tag, and the rules that this uses."""
        rules = [f'call: "\\n" body "\\n" {self._marks[self.END]}', *bodies(tools, "arguments")]
        return "call" + (f' ("\\n" {self._tag} call)*' if several else ""), rules

    def grammar(self, tools, *, text=False, several=False, answer=None):
        calls, rules = self.calls(tools, several)
        if answer is not None:
            return lark(f"{self._tag} {calls} | {json_rule(answer)}", rules)
        if not text:
            return lark(f"{self._tag} {calls}", rules)
        rules.append(f"text: {with_tokens('TEXT?', '(', self._others, ' TEXT?)*')}")
        tag = re.sub(r"([\[\]|])", r"\\\1", self.TAG)
        if self.TAG in self._tokens:  # no text may spell it with other tokens
            rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{tag}(.|\\n)*/")
            return lark(f"text | text {self._tag} {calls}", rules)
        # The first tag in a text begins a call.
        rules.append("TEXT: /(.|\\n)+/")
        rules += [f"begun[lazy]: /(.|\\n)*{tag}/", f"before: {with_tokens('', '(TEXT? ', self._others, ')*')}"]
        return lark(f"text | before begun {calls}", rules)

    def heads(self, tools):
        return dict.fromkeys(tools, self.TAG)

    def read(self, text, ended):
        begin = text.find(self.TAG)
        if begin < 0:
            return Reading(text if ended else without_begin(self.TAG, text).rstrip(), [])
        at, calls = begin + len(self.TAG), []
        while at >= 0 and (found := self.call(text, at, ended)):
            call, end = found
            calls.append(call)
            at = self.following(text, end) if call.complete else -1
        unreadable = ended and not calls and self.END and self.END in text[begin:]
        return Reading(text if unreadable else text[:begin].rstrip(), calls)

    def call(self, text: str, at: int, ended: bool) -> tuple[Call, int] | None:
        """Return the call whose name follows this place, and its end; None if no call does."""
        if (head := HEAD.match(text, at)) is None:
            return None
        call, end = call_in(head[1], text, head.end())
        if ended and not call.complete:
            call = call._replace(arguments=call.arguments.partition(self.END)[0])
        return call, end

    def following(self, text: str, end: int) -> int:
        """Return the place after the next tag, -1 without one."""
        at = text.find(self.TAG, end)
        return at if at < 0 else at + len(self.TAG)
