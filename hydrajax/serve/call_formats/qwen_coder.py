"""Calls of Qwen 3 Coder and Qwen 3.5."""

import copy
import json
import re
from collections.abc import Callable, Mapping

from hydrajax.grammar.schema_faults import JsonCheck
from hydrajax.serve.call_formats.notation import ValueRules, calls_of, constants, properties, raw_text, resolved
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import Call, Schema, json_rule, without_begin

HEAD = re.compile(r"\s*<function=([a-zA-Z0-9_-]+)>\n")
NAME, CLOSED = r"[^>\n]+", "\n</parameter>"
PARAMETER = re.compile(rf"<parameter=({NAME})>\n")


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

    # By function and parameter: checks of values that are not strings; without a check the value is a string.
    _checks: Mapping[str, Mapping[str, Callable[[str], bool]]] = {}

    def reader(self, tools):
        found = copy.copy(self)
        found._checks = {name: _checks(schema) for name, schema in tools.items()}
        return found

    def calls(self, tools, several):
        body, rules = calls_of(tools, _ParameterRules)
        calls, (call, *_) = super().calls({}, several)
        return calls, [call, f"body: {body}", *rules]

    def call(self, text, at, ended):
        if (head := HEAD.match(text, at)) is None:
            return None
        checks, found, at = self._checks.get(head[1], {}), "{", head.end()
        while parameter := PARAMETER.match(text, at):
            end, begin, check = text.find(CLOSED, parameter.end()), parameter.end(), checks.get(parameter[1])
            found += f"{', ' if len(found) > 1 else ''}{json.dumps(parameter[1])}: "
            if end < 0:  # only a string is certain
                begun = json.dumps(without_begin(CLOSED, text[begin:]), ensure_ascii=False)[:-1]
                return Call(head[1], found if check else found + begun, False), len(text)
            raw, at = text[begin:end], end + len(CLOSED) + 1
            is_json = check and raw[:1] != '"' and check(raw)
            found += raw if is_json else json.dumps(raw, ensure_ascii=False)
        complete = text.startswith("</function>", at)
        return Call(head[1], found + "}" * complete, complete), at


def _whole(schema: Schema, root: Schema) -> Schema:
    """Return a schema with the definitions that it refers to."""
    found = resolved(schema, root)
    refers = "$ref" in json.dumps(found)
    return {name: root[name] for name in ("$defs", "definitions") if refers and name in root} | found


def _checks(root: Schema) -> dict[str, Callable[[str], bool]]:
    named, _ = properties(resolved(root, root))
    wholes = {name: _whole(schema, root) for name, schema in named.items() if not _is_text(schema, root)}
    return {name: JsonCheck(json.dumps(schema)) for name, schema in wholes.items()}


def _is_text(schema: Schema, root: Schema) -> bool:
    """Return whether a schema allows nothing but strings."""
    schema = resolved(schema, root)
    if (values := constants(schema)) is not None:
        return all(isinstance(value, str) for value in values)
    arms = schema.get("anyOf", schema.get("oneOf"))
    return all(_is_text(arm, root) for arm in arms) if arms else schema.get("type") == "string"


class _ParameterRules(ValueRules):
    """Rules of calls whose values each end with a tag."""

    NAME = NAME

    def call(self):
        named, required = properties(self.arguments)
        members = (
            f'({json.dumps(f"<parameter={self.named(name)}>")} "\\n" {self.value(schema)} "\\n")'
            + ("" if name in required else "?")
            for name, schema in named.items()
        )
        return f'{json.dumps(f"<function={self.function}>")} "\\n" {" ".join(members)} "</function>"'

    def of_kind(self, kind, schema):
        if kind == "string":
            return self.rule(raw_text(schema, CLOSED))
        return f"{json_rule(_whole(schema, self.root) | {'type': kind})} {json.dumps(CLOSED)}"

    def constant(self, value):
        return json.dumps((value if isinstance(value, str) else json.dumps(value)) + CLOSED)
