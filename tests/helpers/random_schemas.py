"""Random JSON schemas of the keywords that grammars support, from a seed."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["id", "name", "tags", "size", "kind", "left", "right", "a b", "größe", "日付", "x-1", "value"]
PATTERNS = ["^[a-c]{2,4}-[0-9]{2}$", "^(red|green|blue)?$", "^v[0-9]+\\.[0-9]{1,2}$", '^[^\\s"\\\\]{1,6}$', "^.{3}$"]
FORMATS = ["uuid", "ipv4", "date", "time", "email"]
VALUES = [0, -7, 12.5, True, None, "tree", "", 'a "quoted" text', "日本", [], [1, "b"], {"k": [None]}, 1e3]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema that some values satisfy; `$defs` are at the top, and references lead to them."""
    definitions: dict[str, Any] = {}
    for number in range(rng.choice([0, 0, 1, 2])):
        definitions[f"d{number}"] = _schema(rng, 1, list(definitions))
    found = _schema(rng, depth, list(definitions))
    return found | ({"$defs": definitions} if definitions else {})


def _schema(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    leaves = [_integer, _number, _string, _constant, _enum, _boolean, _nullable]
    if names and rng.random() < 0.25:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    if depth == 0 or rng.random() < 0.15 * (3 - depth):
        return rng.choice(leaves)(rng)
    return rng.choice([_object, _object, _array, _tuple, _any_of])(rng, depth, names)


def _object(rng, depth, names):
    keys = rng.sample(NAMES, rng.randint(1, 4))
    required = [key for key in keys if rng.random() < 0.7]
    found = {"type": "object", "properties": {key: _schema(rng, depth - 1, names) for key in keys}}
    more = rng.choice([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
    return found | {"required": required, "additionalProperties": more}


def _array(rng, depth, names):
    least = rng.randint(0, 2)
    bounds = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
    return {"type": "array", "items": _schema(rng, depth - 1, names), **bounds}


def _tuple(rng, depth, names):
    count = rng.randint(1, 3)
    parts = [_schema(rng, depth - 1, names) for _ in range(count)]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.randint(0, count)}


def _any_of(rng, depth, names):
    return {"anyOf": [_schema(rng, depth - 1, names) for _ in range(rng.randint(2, 3))]}


def _integer(rng):
    low = rng.randint(-200, 200)
    found = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 3000)}
    return found if rng.random() < 0.7 else {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9}


def _number(rng):
    low = round(rng.uniform(-5, 5), 2)
    if rng.random() < 0.3:
        return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 8}
    return {"type": "number", "minimum": low, "exclusiveMaximum": round(low + rng.uniform(0.1, 50), 2)}


def _string(rng):
    kind = rng.random()
    if kind < 0.35:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.55:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}


def _constant(rng):
    return {"const": rng.choice(VALUES)}


def _enum(rng):
    return {"enum": rng.sample(VALUES, rng.randint(1, 4))}


def _boolean(rng):
    return {"type": "boolean"}


def _nullable(rng):
    return {"type": [rng.choice(["integer", "boolean"]), "null"]}
