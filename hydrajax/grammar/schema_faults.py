"""JSON schemas that llguidance mishandles are refused, and its finished texts are checked by jsonschema."""

import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
VALUES = ("const", "enum", "default", "examples")  # no schemas
APPLICATORS = ("allOf", "anyOf", "oneOf")  # of schemas for the same value
# llguidance compiles them exactly. Python's `re` has another syntax and no limit of time; jsonschema divides floats.
TRUSTED = ("pattern", "patternProperties", "format", "multipleOf")
MOST_STEPS = 50_000  # of a check, 0.5 s; a longer one is left out


def names_and_patterns(root: Any) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names and the patterns of properties for every value to which both apply."""
    parts, linked = list(_parts(root)), defaultdict(list)
    for part in parts:
        targets = [target(root, part["$ref"])] if "$ref" in part else []
        for other in targets + [one for key in APPLICATORS for one in part.get(key, ())]:
            linked[id(part)].append(other)
            linked[id(other)].append(part)
    seen: set[int] = set()
    for part in parts:
        names, patterns, waiting = {}, {}, [part]
        while waiting:
            one = waiting.pop()
            if id(one) not in seen and isinstance(one, dict):
                seen.add(id(one))
                waiting += linked[id(one)]
                names |= dict.fromkeys([*one.get("properties", ()), *one.get("required", ())])
                patterns |= dict.fromkeys(one.get("patternProperties", ()))
        if names and patterns:
            yield list(names), list(patterns)


def mishandled(root: Any) -> str:
    """Return the keyword that llguidance would mishandle in a schema that it accepts, and why; "" for none."""
    if "x-guidance" in root:
        return "x-guidance: got options of llguidance, expected a schema without them"
    for part in _parts(root):
        # It lets a name occur twice, and rounds constants.
        if (least := part.get("minProperties", 0)) > (most := 1 + len(set(part.get("required", ())))):
            return f"minProperties: got {least}, expected at most {most}, one more than required"
        for value in (part.get("const"), *part.get("enum", ())):
            if type(value) in (int, float) and len(Decimal(str(value)).normalize().as_tuple().digits) > 15:
                return f"const: got {value}, expected at most 15 digits"
        if "prefixItems" in part and ("additionalItems" in part or isinstance(part.get("items"), list)):
            return "prefixItems: got it with additionalItems or a list of items, expected one dialect of JSON schema"
    return ""


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key not in VALUES:
                inner = value.values() if key in MAPS else value if isinstance(value, list) else [value]
                for one in inner:
                    yield from _parts(one)


def target(root: Any, reference: str) -> Any:
    """Return the schema at a JSON pointer, None for other references."""
    if not f"{reference}/".startswith("#/"):
        return None
    try:
        for step in unquote(reference).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            root = root[int(step)] if isinstance(root, list) else root[step]
    except (LookupError, TypeError, ValueError):
        return None
    return root


@functools.lru_cache(maxsize=16)
class JsonCheck:
    """Tells whether a text is JSON that is valid under a schema. Never reads a file or an address."""

    def __init__(self, schema: str):
        self._schema, self._left = schema, 0

    @functools.cached_property
    def _validator(self) -> Any:
        import jsonschema
        import referencing

        schema = json.loads(self._schema, parse_float=Decimal)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        rules = {name: functools.partial(self._rule, name, rule) for name, rule in kind.VALIDATORS.items()}
        return jsonschema.validators.extend(kind, rules)(schema, registry=referencing.Registry())

    def __call__(self, text: str) -> bool:
        self._left = MOST_STEPS
        try:
            value = json.loads(text, parse_float=Decimal)
            return bool(self._validator.is_valid(value))
        except json.JSONDecodeError:
            return False
        except Exception:  # nested too deep, too many digits or steps, an unknown reference: llguidance has judged it
            return True

    def _rule(self, name: str, rule: Any, validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        self._left -= 1 + (len(value) if isinstance(value, (list, dict)) else 0)
        if self._left < 0:
            raise TimeoutError
        by_pattern = name == "additionalProperties" and "patternProperties" in schema
        # True allows everything, or is an exclusive bound of draft 4 under another dialect.
        no_limit = value is True and name != "const"
        return () if name in TRUSTED or by_pattern or no_limit else rule(validator, value, instance, schema)
