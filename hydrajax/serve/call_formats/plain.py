"""Calls in place of any text: Llama 3, and the base of Llama 4's."""

from collections.abc import Collection, Mapping
from typing import ClassVar

from hydrajax.serve.tool_calls import (
    HEAD,
    CallFormat,
    Reading,
    Schema,
    bodies,
    call_in,
    json_head,
    json_rule,
    lark,
    with_tokens,
)


class PlainCalls(CallFormat):
    """Calls of Llama 3: a JSON object with ``name`` and ``parameters``; one per answer.

    Attributes:
        OPEN: the first character of a call.
        BEGINS, ENDS: special tokens before and after, which are not part of an answer's text.
    """

    OPEN = "{"
    BEGINS: ClassVar[tuple[str, ...]] = ("<|python_tag|>", "<|python_start|>")
    ENDS: ClassVar[tuple[str, ...]] = ("<|python_end|>",)

    def __init__(self, added: Mapping[str, int], special: Collection[str] = ()):
        """Read which marks are tokens, see `TaggedCalls`."""
        marks = [[added[mark] for mark in some if mark in special] for some in (self.BEGINS, self.ENDS)]
        self._begin, self._end = (with_tokens("", "(", some, ")?") for some in marks)
        self._others = [i for text, i in added.items() if text not in special]

    def calls(self, tools: Mapping[str, Schema], several: bool) -> tuple[str, list[str]]:
        """Return the rule of calls, and those that it uses."""
        return "body", bodies(tools, "parameters")

    def grammar(self, tools, *, text=False, several=False, answer=None):
        calls, rules = self.calls(tools, several)
        start = f"{self._begin} {calls} {self._end}".strip()
        if answer is not None:
            start += f" | {json_rule(answer)}"
        elif text:  # it cannot begin as a call does
            start += " | text"
            rules += [f"FIRST: /\\s*[^\\{self.OPEN}\\s](.|\\n)*/", "TEXT: /(.|\\n)+/"]
            rules += [f"text: {with_tokens('FIRST?', '(', self._others, ' TEXT?)*')}"]
        return lark(start, rules)

    def heads(self, tools):
        return {name: "".join(json_head(name, "parameters")) for name in tools}

    def read(self, text, ended):
        if not text.startswith(self.OPEN):
            return Reading(text, [])
        if head := HEAD.match(text):
            return Reading("", [call_in(head[1], text, head.end())[0]])
        return Reading(text if ended else "", [])
