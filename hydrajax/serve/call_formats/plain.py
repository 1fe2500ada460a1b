"""Calls of Llama 3."""

from collections.abc import Mapping

from hydrajax.serve.tool_calls import (
    HEAD,
    CallFormat,
    Reading,
    bodies,
    call_in,
    json_head,
    json_rule,
    lark,
    with_tokens,
)


class PlainCalls(CallFormat):
    """Calls of Llama 3: a JSON object with ``name`` and ``parameters`` in place of any text; one per answer."""

    MARK = "<|python_tag|>"  # a special token, which is not part of an answer's text

    def __init__(self, added: Mapping[str, int]):
        """``added``: ids of the added tokens."""
        self._mark = f"<[{added[self.MARK]}]>? " if self.MARK in added else ""
        self._others = [token for text, token in added.items() if text != self.MARK]

    def grammar(self, tools, *, text=False, several=False, answer=None):
        start, rules = f"{self._mark}body", bodies(tools, "parameters")
        if answer is not None:
            start += f" | {json_rule(answer)}"
        elif text:  # it cannot begin as a call does
            start += " | text"
            rules += ["FIRST: /\\s*[^{\\s](.|\\n)*/", "TEXT: /(.|\\n)+/"]
            rules += [f"text: {with_tokens('FIRST?', '(', self._others, ' TEXT?)*')}"]
        return lark(start, rules)

    def heads(self, tools):
        return {name: "".join(json_head(name, "parameters")) for name in tools}

    def read(self, text, ended):
        if not text.startswith("{"):
            return Reading(text, [])
        if head := HEAD.match(text):
            return Reading("", [call_in(head[1], text, head.end())[0]])
        return Reading(text if ended else "", [])
