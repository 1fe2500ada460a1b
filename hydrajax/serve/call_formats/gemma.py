"""Calls of Gemma 4 and FunctionGemma."""

import json
import re
from typing import ClassVar

from hydrajax.serve.call_formats.notation import ValueRules, as_json, raw_text
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import Call, without_begin

HEAD = re.compile(r"call:([a-zA-Z0-9_-]+)\{")
NAME = r"[^:,{}\[\]<]+"  # or a number or a constant, which a character must end


class GemmaCalls(TaggedCalls):
    """Calls of Gemma 4: ``<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>``. Attributes: QUOTE: around strings."""

    TAG, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    MARKS = (TAG, END, QUOTE)

    def calls(self, tools, several):
        found, rules = [], []
        for number, (name, schema) in enumerate(tools.items()):
            values = GemmaRules(name, f"v{number}x", schema, self._marks[self.QUOTE], self.QUOTE)
            found.append(f'{json.dumps(f"call:{name}{{")} {values.members(values.arguments, values.key)} "}}"')
            rules += values.rules
        rules.append(f"call: ({' | '.join(found)}) {self._marks[self.END]}")
        return "call" + (f" ({self._tag} call)*" if several else ""), rules

    def call(self, text, at, ended):
        if (head := HEAD.match(text, at)) is None:
            return None
        quote = re.escape(self.QUOTE)
        scan = re.compile(
            rf"{quote}(?P<text>.*?)(?P<end>{quote}|\Z)|(?P<name>{NAME}):|{NAME}(?=[,\]}}])|[,\[\]{{}}]", re.DOTALL
        )
        arguments, end, complete = as_json(text, head.end(), "}", scan.match, self._written)
        return Call(head[1], arguments, complete), end

    def _written(self, piece: re.Match) -> str:
        if (text := piece["text"]) is not None:
            return (
                json.dumps(text, ensure_ascii=False)
                if piece["end"]
                else json.dumps(without_begin(self.QUOTE, text), ensure_ascii=False)[:-1]
            )
        return (
            f"{json.dumps(piece['name'], ensure_ascii=False)}: "
            if piece["name"]
            else ", "
            if piece[0] == ","
            else piece[0]
        )


class FunctionGemmaCalls(GemmaCalls):
    """Calls of FunctionGemma: ``<start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>``."""

    TAG, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    MARKS = (TAG, END, QUOTE)


class GemmaRules(ValueRules):
    """Rules of values in Gemma's notation."""

    WORDS: ClassVar = {}  # as in JSON
    COMMA = ","
    ANY_KEY = '/[a-zA-Z0-9_-]+/ ":"'

    def __init__(self, name, prefix, schema, quote, text):
        super().__init__(name, prefix, schema)
        self._quote, self._is_token, self._text = quote, quote != json.dumps(text), text

    def text(self, value):
        return f"{self._quote} {json.dumps(value)} {self._quote}"

    def key(self, name):
        return json.dumps(f"{self.checked(name, NAME)}:")

    def string(self, schema):
        text = self.rule(raw_text(schema, "" if self._is_token else self._text), terminal=True)
        return f"{self._quote} {text} {self._quote if self._is_token else ''}"
