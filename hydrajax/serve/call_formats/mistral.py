"""Calls of Mistral."""

import json
import random
import re
import string

from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import HEAD, bodies, call_in, json_rule

NAMED = re.compile(r"([a-zA-Z0-9_-]+)\[ARGS\](?=\{)")
LIST, NEXT = re.compile(r"\s*\["), re.compile(r"\},\s*(?=\{)")


class MistralCalls(TaggedCalls):
    """Calls after ``[TOOL_CALLS]``: ``NAME[ARGS]{...}`` if the tokenizer has the second mark, else a JSON list."""

    TAG, END, ARGS = "[TOOL_CALLS]", "", "[ARGS]"
    MARKS = (TAG, ARGS)

    def new_id(self):
        """Return nine letters and digits, which Mistral's templates require."""
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))

    def calls(self, tools, several):
        if self.ARGS not in self._tokens:
            more = ' (", " body)*' if several else ""
            return f'" "? "[" body{more} "]"', bodies(tools, "arguments")
        found = [f"{json.dumps(name)} {self._marks[self.ARGS]} {json_rule(schema)}" for name, schema in tools.items()]
        return "call" + (f" ({self._tag} call)*" if several else ""), [f"call: {' | '.join(found)}"]

    def call(self, text, at, ended):
        begin = LIST.match(text, at)
        head = HEAD.match(text, begin.end() if begin else at) or NAMED.match(text, at)
        return head and call_in(head[1], text, head.end())

    def following(self, text, end):
        more = NEXT.match(text, end)
        return more.end() if more else super().following(text, end)
