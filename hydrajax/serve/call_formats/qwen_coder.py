"""Calls of Qwen 3 Coder and Qwen 3.5."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hydrajax.grammar.schema_faults import JsonCheck
from hydrajax.serve.call_formats.notation import DEFINITIONS, ValueRules, kinds, properties, raw_text, resolved
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import Call, Schema, json_rule, without_begin

HEAD = re.compile(r"\s*<function=([a-zA-Z0-9_-]+)>\n")
NAME = r"[^>\n]+"
PARAMETER = re.compile(rf"<parameter=({NAME})>\n")
CLOSED = "\n</parameter>"


class QwenCoderCalls(TaggedCalls):
    """Calls with a tag for each parameter. Strings are written as they are, other values as JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
    """

    _tools: Mapping[str, Mapping[str, "_Parameter"]] = {}

    def reader(self, tools):
        found = copy.copy(self)
        found._tools = {name: _parameters(schema) for name, schema in tools.items()}
        return found

    def calls(self, tools, several):
        found, rules = [], []
        for number, (name, schema) in enumerate(tools.items()):
            values = _ParameterRules(name, f"v{number}x", schema)
            found.append(f'{json.dumps(f"<function={name}>")} "\\n" {values.parameters()} "</function>"')
            rules += values.rules
        calls, more = super().calls({}, several)
        return calls, [more[0], f"body: {' | '.join(found)}", *rules]

    def call(self, text, at, ended):
        if (head := HEAD.match(text, at)) is None:
            return None
        parameters, found, at = self._tools.get(head[1], {}), "{", head.end()
        while parameter := PARAMETER.match(text, at):
            end = text.find(CLOSED, parameter.end())
            raw = text[parameter.end() : end] if end >= 0 else without_begin(CLOSED, text[parameter.end() :])
            found += f"{', ' if len(found) > 1 else ''}{json.dumps(parameter[1])}: "
            found += parameters.get(parameter[1], ANY).as_json(raw, end >= 0)
            if end < 0:
                return Call(head[1], found, False), len(text)
            at = end + len(CLOSED) + 1
        complete = text.startswith("</function>", at)
        return Call(head[1], found + "}" * complete, complete), at


class _Parameter(NamedTuple):
    """How a parameter's value is read: as a string, as JSON, or as JSON if it is valid under a schema."""

    strings: bool
    others: Callable[[str], bool] | None

    def as_json(self, raw: str, complete: bool) -> str:
        """Return the value in JSON: as much as is certain."""
        if not self.strings:
            return raw
        if self.others is not None:
            if not complete:
                return ""
            if raw[:1] != '"' and self.others(raw):
                return raw
        written = json.dumps(raw, ensure_ascii=False)
        return written if complete else written[:-1]


ANY = _Parameter(True, JsonCheck("{}"))


def _parameters(root: Schema) -> dict[str, _Parameter]:
    found = {}
    for name, schema in properties(resolved(root, root))[0].items():
        strings, others = "string" in (allowed := kinds(schema, root)), len(allowed) > 1
        found[name] = _Parameter(strings, JsonCheck(json.dumps(_whole(schema, root))) if strings and others else None)
    return found


def _whole(schema: Schema, root: Schema) -> Schema:
    """Return a schema with the definitions that it refers to."""
    return {name: root[name] for name in DEFINITIONS if name in root} | resolved(schema, root)


class _ParameterRules(ValueRules):
    """Rules of the parameters' values, each with the line that ends it."""

    def parameters(self) -> str:
        named, required = properties(self.arguments)
        return " ".join(
            f'({json.dumps(f"<parameter={self.checked(name, NAME)}>")} "\\n" {self.value(schema)} "\\n")'
            + ("" if name in required else "?")
            for name, schema in named.items()
        )

    def of_kind(self, kind, schema):
        if kind == "string":
            return self.rule(raw_text(schema, CLOSED), terminal=True)
        return f"{json_rule(_whole(schema, self._root) | {'type': kind})} {json.dumps(CLOSED)}"

    def constant(self, value):
        return json.dumps((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) + CLOSED)
