"""Calls of Gemma 4 and FunctionGemma."""

import json
import re
from functools import partial

from hydrajax.serve.call_formats.notation import ValueRules, as_json, calls_of, raw_text
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import Call, without_begin

HEAD = re.compile(r"call:([a-zA-Z0-9_-]+)\{")
NAME = r"[^:,{}\[\]<]+"  # or a number or a constant, which a character must end


class GemmaCalls(TaggedCalls):
    """Calls of Gemma 4: ``<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>``. Attributes: QUOTE: around strings."""

    TAG, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    MARKS = (TAG, END, QUOTE)

    def calls(self, tools, several):
        quote = self._marks[self.QUOTE], "" if self.QUOTE in self._tokens else self.QUOTE
        call, rules = calls_of(tools, partial(_GemmaRules, *quote))
        rules.append(f"call: ({call}) {self._marks[self.END]}")
        return "call" + (f" ({self._tag} call)*" if several else ""), rules

    def call(self, text, at, ended):
        if (head := HEAD.match(text, at)) is None:
            return None
        string = "{0}(?P<text>.*?)(?P<end>{0}|\\Z)".format(re.escape(self.QUOTE))
        scan = re.compile(rf"{string}|(?P<name>{NAME}):|{NAME}(?=[,\]}}])|[,\[\]{{}}]", re.DOTALL)
        arguments, end, complete = as_json(text, head.end(), "}", scan.match, self._written)
        return Call(head[1], arguments, complete), end

    def _written(self, piece: re.Match) -> str:
        if piece["name"]:
            return f"{json.dumps(piece['name'], ensure_ascii=False)}: "
        if piece["text"] is None:
            return ", " if piece[0] == "," else piece[0]
        if piece["end"]:
            return json.dumps(piece["text"], ensure_ascii=False)
        return json.dumps(without_begin(self.QUOTE, piece["text"]), ensure_ascii=False)[:-1]


class FunctionGemmaCalls(GemmaCalls):
    """Calls of FunctionGemma: ``<start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>``."""

    TAG, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    MARKS = (TAG, END, QUOTE)


class _GemmaRules(ValueRules):
    """Rules of calls in Gemma's notation."""

    NAME, WORDS = NAME, {}
    COMMA, ANY_KEY = '","', '/[a-zA-Z0-9_-]+/ ":"'

    def __init__(self, quote: str, end: str, *function):
        """``quote``: expression of what is around strings; ``end``: its text, "" for a token."""
        super().__init__(*function)
        self._quote, self._end = quote, end

    def call(self):
        return f'{json.dumps(f"call:{self.function}{{")} {self.members(self.arguments, self.key)} "}}"'

    def constant(self, value):
        return f"{self._quote} {json.dumps(value)} {self._quote}" if isinstance(value, str) else super().constant(value)

    def key(self, name):
        return json.dumps(f"{self.named(name)}:")

    def of_kind(self, kind, schema):
        if kind != "string":
            return super().of_kind(kind, schema)
        return f"{self._quote} {self.rule(raw_text(schema, self._end))} {'' if self._end else self._quote}"
