"""Calls of Llama 4 in Python."""

import json
import re

from hydrajax.serve.call_formats.notation import ValueRules, as_json, calls_of
from hydrajax.serve.call_formats.plain import PlainCalls
from hydrajax.serve.tool_calls import Call, Reading

HEAD = re.compile(r",?\s*([a-zA-Z0-9_-]+)\(")
# A string as in JSON, which may be incomplete; a parameter's name; a number or a constant, which a character must end.
PIECE = re.compile(
    r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|(?P<name>[\w-]+)=|(?P<word>[\w.+-]+)(?=[^\w.+=-])|[\s,:\[\]{}]', re.DOTALL
)
TO_JSON = {written: word for word, written in ValueRules.WORDS.items()}


class PythonicCalls(PlainCalls):
    """Calls as a list of Python expressions: ``[f(a=1, b="x"), g()]``, in place of any text."""

    OPEN = "["

    def calls(self, tools, several):
        call, rules = calls_of(tools, ValueRules)
        more = ' (", " call)*' if several else ""
        return "called", [f'called: "[" call{more} "]"', f"call: {call}", *rules]

    def heads(self, tools):
        return {name: f"[{name}(" for name in tools}

    def read(self, text, ended):
        if not text.startswith(self.OPEN):
            return Reading(text, [])
        at, calls = 1, []
        while head := HEAD.match(text, at):
            arguments, at, complete = as_json(text, head.end(), ")", PIECE.match, _written)
            calls.append(Call(head[1], arguments, complete))
        return Reading(text if ended and not calls else "", calls)


def _written(piece: re.Match) -> str:
    if piece["name"]:
        return f"{json.dumps(piece['name'])}: "
    return TO_JSON.get(piece[0], piece[0])
