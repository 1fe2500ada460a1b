"""Values of JSON schemas in other notations than JSON: their grammar, and their translation to JSON."""

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

from hydrajax.errors import HydrajaxError
from hydrajax.grammar.schema_faults import JsonCheck, target
from hydrajax.serve.tool_calls import Schema, json_rule

# The keywords of each kind of value; without any, a schema allows all kinds.
KINDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
}
OF_TYPE = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
# Keywords without a rule. Those that llguidance does not support either are refused before.
REFUSED = {"allOf", "patternProperties", "prefixItems", "minProperties", "maxProperties", "contains", "propertyNames"}
DEFINITIONS = ("$defs", "definitions")


def resolved(schema: Any, root: Schema) -> Schema:
    """Return a schema without references at its top."""
    for _ in range(32):  # the length of a chain
        schema = {} if schema is True else schema
        parts = [target(root, schema["$ref"]) or {}] if "$ref" in schema else schema.get("allOf", ())
        if len(parts) != 1:
            break
        schema = {name: value for name, value in schema.items() if name not in ("$ref", "allOf")} | parts[0]
    return schema


def kinds(schema: Any, root: Schema) -> set[str]:
    """Return the kinds of values that a schema allows."""
    schema = resolved(schema, root)
    if "const" in schema or "enum" in schema:
        return {OF_TYPE.get(type(json.loads(value)), "number") for value in _constants(schema)}
    if arms := schema.get("anyOf") or schema.get("oneOf"):
        return set().union(*(kinds(arm, root) for arm in arms))
    return {"number" if kind == "integer" else kind for kind in _types(schema)}


def _types(schema: Schema) -> list[str]:
    implied = [kind for kind, keywords in KINDS.items() if any(keyword in schema for keyword in keywords)]
    found = schema.get("type") or implied or list(KINDS)
    return [found] if isinstance(found, str) else found


def _constants(schema: Schema) -> list[str]:
    """Return the values of ``enum`` or ``const`` that the rest of the schema allows, as JSON."""
    check = JsonCheck(json.dumps(schema))
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return [found for value in values if check(found := json.dumps(value, ensure_ascii=False))]


class ValueRules:
    """Rules of a grammar for values under the schema of a function's arguments, in Python's notation.

    Attributes:
        WORDS: true, false and null.
        COMMA: between the items of a list.
        ANY_KEY: expression of any name in an object.
        rules: all rules so far.
        arguments: the schema of the arguments.
    """

    WORDS: ClassVar[dict[str, str]] = {"true": "True", "false": "False", "null": "None"}
    COMMA, ANY_KEY = ", ", f'{json_rule({"type": "string"})} ": "'

    def __init__(self, name: str, prefix: str, schema: Schema):
        """Begin rules of a function.

        Args:
            name: the function's.
            prefix: of the rules' names.
            schema: of the arguments; references point into it.
        """
        self._name, self._prefix, self._root, self.rules = name, prefix, schema, list[str]()
        self.arguments, self._found = resolved(schema, schema), dict[str, str]()
        if found := (REFUSED | {"anyOf", "oneOf", "const", "enum"}) & self.arguments.keys():
            raise self.refused(min(found))
        self.comma = json.dumps(self.COMMA)

    def value(self, schema: Any) -> str:
        """Return the name of the rule for a schema."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._found:  # known before its expression, which may refer to it
            self._found[key] = self.rule("")
            at = len(self.rules) - 1
            self.rules[at] += self._expression(resolved(schema, self._root))
        return self._found[key]

    def rule(self, expression: str, terminal: bool = False) -> str:
        """Add a rule and return its name."""
        name = f"{self._prefix}{len(self.rules)}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}: {expression}")
        return name

    def refused(self, what: str) -> HydrajaxError:
        return HydrajaxError(
            f"tools: got {what} in the parameters of {self._name}, which this base's format of calls cannot follow; "
            "remove it, or choose another --tool-parser"
        )

    def checked(self, name: str, pattern: str) -> str:
        """Return the name of a member; refuse one that the notation cannot write."""
        if not re.fullmatch(pattern, name):
            raise self.refused(f"the name {name!r}")
        return name

    def _expression(self, schema: Schema) -> str:
        if found := REFUSED & schema.keys():
            raise self.refused(min(found))
        if "const" in schema or "enum" in schema:
            return " | ".join(self.constant(json.loads(value)) for value in _constants(schema))
        if name := next((name for name in ("anyOf", "oneOf") if name in schema), None):
            rest = {key: value for key, value in schema.items() if key != name}
            arms = [resolved(arm, self._root) for arm in schema[name] if arm is not False]
            if any(arm.get(key, value) != value for arm in arms for key, value in rest.items() if key in _KEYWORDS):
                raise self.refused(name)
            return " | ".join(self.value(rest | arm) for arm in arms)
        return " | ".join(self.of_kind(kind, schema) for kind in _types(schema))

    def of_kind(self, kind: str, schema: Schema) -> str:
        """Return the expression of one kind of values under a schema."""
        match kind:
            case "object":
                return f'"{{" {self.members(schema, self.key)} "}}"'
            case "array":
                item, low, high = self.value(schema.get("items", {})), schema.get("minItems", 0), schema.get("maxItems")
                more = f"({self.comma} {item}){{{max(low - 1, 0)},{'' if high is None else max(high - 1, 0)}}}"
                items = "" if high == 0 else f"{item} {more}" if low else f"({item} {more})?"
                return f'"[" {items} "]"'
            case "string":
                return self.string(schema)
            case "boolean":
                return f"{self.constant(True)} | {self.constant(False)}"
            case "null":
                return self.constant(None)
        return json_rule({name: schema[name] for name in KINDS["number"] if name in schema} | {"type": kind})

    def members(self, schema: Schema, key: Callable[[str], str]) -> str:
        """Return the expression of an object's members in the order of its properties, or of any if it has none.

        Args:
            schema: of the object.
            key: returns the expression of a name and what separates it from its value.
        """
        named, required = properties(schema)
        if not named:
            more = schema.get("additionalProperties", True)
            member = f"{self.ANY_KEY} {self.value(more)}" if more is not False else ""
            return member and f"({member} ({self.comma} {member})*)?"
        after, firsts = "", list[str]()
        for name in reversed(named):
            member = f"{key(name)} {self.value(named[name])}"
            firsts = [f"{member} {after}", *(firsts if name not in required else ())]
            after = self.rule(f"({self.comma} {member}){'' if name in required else '?'} {after}")
        return f"({' | '.join(firsts)}){'' if required else '?'}"

    def constant(self, value: Any) -> str:
        """Return the expression of a value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return f'"[" {f" {self.comma} ".join(map(self.constant, value))} "]"'
        if isinstance(value, dict):
            members = (f"{self.key(name)} {self.constant(member)}" for name, member in value.items())
            return f'"{{" {f" {self.comma} ".join(members)} "}}"'
        written = json.dumps(value)
        return json.dumps(self.WORDS.get(written, written))

    def text(self, value: str) -> str:
        """Return the expression of a string."""
        return json.dumps(json.dumps(value, ensure_ascii=False))

    def key(self, name: str) -> str:
        """Return the expression of a name in an object, and of what separates it from its value."""
        return json.dumps(json.dumps(name, ensure_ascii=False) + ": ")

    def string(self, schema: Schema) -> str:
        """Return the expression of strings under a schema."""
        return json_rule(
            {name: schema[name] for name in (*KINDS["string"], "format") if name in schema} | {"type": "string"}
        )


_KEYWORDS = {keyword for keywords in KINDS.values() for keyword in keywords} | {"type"}


def properties(schema: Schema) -> tuple[dict[str, Any], set[str]]:
    """Return the schemas of an object's members by name, and the names of the required ones."""
    named, required = schema.get("properties", {}), schema.get("required", [])
    return named | {name: True for name in required if name not in named}, set(required)


def raw_text(schema: Schema, end: str) -> str:
    """Return a terminal of raw text under a schema of strings, up to the first ``end``, which it contains; ``format``
    is a remark.
    """
    end = re.sub(r"([/|])", r"\\\1", end).replace("\n", "\\n")
    found = [f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}{end}/"]
    if pattern := schema.get("pattern"):
        first, last = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = re.sub(r"\\.|/", lambda one: one[0] if len(one[0]) > 1 else r"\/", pattern[first : len(pattern) - last])
        anything = "(.|\\n)*"
        found.append(f"/{'' if first else anything}({inner}){'' if last else anything}{end}/")
    return " & ".join([*found, *([f"~/(.|\\n)*{end}(.|\\n)+/"] if end else [])])


def as_json(
    text: str, at: int, close: str, scan: Callable[[str, int], re.Match | None], write: Callable[[re.Match], str]
) -> tuple[str, int, bool]:
    """Translate the members of an object up to its end.

    Args:
        text: an answer.
        at: the place of the first member.
        close: the character after the last one.
        scan: matches the next piece of the notation, None if it may be incomplete.
        write: returns a piece in JSON.

    Returns:
        The JSON so far, its end in the text, and whether it is complete.
    """
    found, depth = ["{"], 0
    while at < len(text):
        if text[at] == close and not depth:
            return "".join([*found, "}"]), at + 1, True
        depth += (text[at] in "[{") - (text[at] in "]}")
        if (piece := scan(text, at)) is None:
            break
        found.append(write(piece))
        at = piece.end()
    return "".join(found), len(text), False
