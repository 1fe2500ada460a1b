"""Values of JSON schemas in other notations than JSON: their grammar, and their translation to JSON."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hydrajax.errors import HydrajaxError
from hydrajax.grammar.schema_faults import JsonCheck, target
from hydrajax.serve.tool_calls import Schema, escaped, json_rule

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# The keywords of each kind of value; a schema without any allows all kinds.
KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": NUMERIC,
    "boolean": (),
    "null": (),
}
# Keywords without a rule here that llguidance supports in JSON.
REFUSED = {"allOf", "patternProperties", "prefixItems", "minProperties", "maxProperties"}
LINE = "\\n"  # a line break in an expression
NOTHING: Schema = {"enum": []}


def resolved(schema: Any, root: Schema) -> Schema:
    """Return a schema without references at its top."""
    for _ in range(64):  # references may form a circle
        if not isinstance(schema, dict):
            return {} if schema is True else NOTHING
        parts = [target(root, schema["$ref"])] if "$ref" in schema else schema.get("allOf", ())
        if len(parts) != 1:
            return schema
        part = {} if parts[0] is True else parts[0]
        rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf")}
        schema = rest | part if isinstance(part, dict) else part
    return NOTHING


def properties(schema: Schema) -> tuple[dict[str, Any], set[str]]:
    """Return the schemas of an object's members by name, and the names of the required ones."""
    named, required = schema.get("properties", {}), schema.get("required", [])
    return named | {name: True for name in required if name not in named}, set(required)


def constants(schema: Schema) -> list[Any] | None:
    """Return the values of ``enum`` or ``const`` that the rest of a schema allows, None without any."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    check = JsonCheck(json.dumps(schema))
    return values and [value for value in values if check(json.dumps(value))]


class ValueRules:
    """Rules of a grammar for calls of a function, in Python's notation; classes of other notations override it.

    Attributes:
        NAME: pattern of a parameter's name.
        WORDS: true, false and null.
        COMMA: between two members or items.
        ANY_KEY: expression of any name in an object.
        arguments: the schema of the arguments.
        rules: all rules so far.
    """

    NAME = r"[\w-]+"
    WORDS: ClassVar[dict[str, str]] = {"true": "True", "false": "False", "null": "None"}
    COMMA, ANY_KEY = '", "', f'{json_rule({"type": "string"})} ": "'

    def __init__(self, function: str, prefix: str, schema: Schema):
        """``prefix``: of the rules' names; ``schema``: of the arguments, which its references point into."""
        self.function, self._prefix, self.root, self.rules = function, prefix, schema, list[str]()
        self.arguments, self._names = resolved(schema, schema), dict[str, str]()
        if found := (REFUSED | {"anyOf", "oneOf", "const", "enum"}) & self.arguments.keys():
            raise self.refused(min(found))

    def refused(self, what: str) -> HydrajaxError:
        return HydrajaxError(
            f"tools: got {what} in the parameters of {self.function}, which this base's format of calls cannot "
            "follow; remove it, or choose another --tool-parser"
        )

    def call(self) -> str:
        """Return the expression of a call."""
        members = self.members(self.arguments, lambda name: json.dumps(f"{self.named(name)}="))
        return f'{json.dumps(f"{self.function}(")} {members} ")"'

    def named(self, name: str) -> str:
        """Return the name of a parameter; refuse one that the notation cannot write."""
        if not re.fullmatch(self.NAME, name):
            raise self.refused(f"the name {name!r}")
        return name

    def rule(self, expression: str) -> str:
        """Add a rule and return its name; a terminal's expression begins with a slash."""
        name = f"{self._prefix}{len(self.rules)}"
        name = name.upper() if expression.startswith("/") else name
        self.rules.append(f"{name}: {expression}")
        return name

    def value(self, schema: Any) -> str:
        """Return the name of the rule for a schema."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._names:  # named before its expression, which may refer to it
            self._names[key], at = self.rule(""), len(self.rules)
            self.rules[at - 1] += self._expression(resolved(schema, self.root))
        return self._names[key]

    def _expression(self, schema: Schema) -> str:
        arms = schema.get("anyOf", schema.get("oneOf"))
        kinds = schema.get("type") or [kind for kind in KEYWORDS if schema.keys() & KEYWORDS[kind]]
        if found := (REFUSED & schema.keys()) or (arms and kinds and {"anyOf"}):
            raise self.refused(min(found))
        if (values := constants(schema)) is not None:
            if not values or any(isinstance(value, (list, dict)) for value in values):
                raise self.refused("enum")
            return " | ".join(map(self.constant, values))
        if arms:
            return " | ".join(self.value(arm) for arm in arms)
        kinds = [kinds] if isinstance(kinds, str) else kinds or KEYWORDS
        return " | ".join(self.of_kind(kind, schema) for kind in kinds)

    def constant(self, value: Any) -> str:
        """Return the expression of a string, a number, true, false or null."""
        written = json.dumps(value, ensure_ascii=False)
        return json.dumps(self.WORDS.get(written, written))

    def key(self, name: str) -> str:
        """Return the expression of a name in an object, and of what separates it from its value."""
        return json.dumps(f"{json.dumps(name, ensure_ascii=False)}: ")

    def of_kind(self, kind: str, schema: Schema) -> str:
        """Return the expression of one kind of values under a schema."""
        match kind:
            case "object":
                return f'"{{" {self.members(schema, self.key)} "}}"'
            case "array":
                item, low, high = self.value(schema.get("items", {})), schema.get("minItems", 0), schema.get("maxItems")
                more = f"({self.COMMA} {item}){{{max(low - 1, 0)},{'' if high is None else max(high - 1, 0)}}}"
                items = "" if high == 0 else f"{item} {more}" if low else f"({item} {more})?"
                return f'"[" {items} "]"'
            case "boolean":
                return f"{self.constant(True)} | {self.constant(False)}"
            case "null":
                return self.constant(None)
        keywords = KEYWORDS.get(kind, NUMERIC)
        return json_rule({"type": kind} | {name: schema[name] for name in keywords if name in schema})

    def members(self, schema: Schema, key: Callable[[str], str]) -> str:
        """Return the expression of an object's members in the order of its properties, or of any if it has none.

        Args:
            schema: of the object.
            key: returns the expression of a name and what separates it from its value.
        """
        named, required = properties(schema)
        if not named:
            if (others := schema.get("additionalProperties", True)) is False:
                return ""
            member = f"{self.ANY_KEY} {self.value(others)}"
            return f"({member} ({self.COMMA} {member})*)?"
        after, firsts = "", list[str]()
        for name in reversed(named):
            member = f"{key(name)} {self.value(named[name])}"
            firsts = [f"{member} {after}", *(firsts if name not in required else ())]
            after = self.rule(f"({self.COMMA} {member}){'' if name in required else '?'} {after}")
        return f"({' | '.join(firsts)}){'' if required else '?'}"


def calls_of(tools: Mapping[str, Schema], make: Callable[[str, str, Schema], ValueRules]) -> tuple[str, list[str]]:
    """Return the expression of a call of any tool, and the rules that it uses; ``make``: makes those of a tool."""
    values = [make(name, f"v{number}x", schema) for number, (name, schema) in enumerate(tools.items())]
    call = " | ".join(each.call() for each in values)
    return call, [rule for each in values for rule in each.rules]


def raw_text(schema: Schema, end: str) -> str:
    """Return a terminal of raw text under a schema of strings and ``end``, which the text does not contain, not even
    without its line break.
    """
    end, anything = re.sub(r"([/|])", r"\\\1", end).replace("\n", LINE), f"(.|{LINE})*"
    found = [f"/(.|{LINE}){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}{end}/"]
    if pattern := schema.get("pattern"):
        first, last = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = escaped(pattern[first : len(pattern) - last])
        found.append(f"/{'' if first else anything}({inner}){'' if last else anything}{end}/")
    return " & ".join([*found, *([f"~/{anything}{end.removeprefix(LINE)}(.|{LINE})+/"] if end else [])])


def as_json(
    text: str, at: int, close: str, scan: Callable[[str, int], re.Match | None], write: Callable[[re.Match], str]
) -> tuple[str, int, bool]:
    """Translate the members of an object.

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
