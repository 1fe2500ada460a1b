"""Random JSON schemas, decoded by the bundled model: every finished output is valid by jsonschema, with any draft."""

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest

import hydrajax
from hydrajax.decoding.request import Request
from hydrajax.grammar.grammar import Grammar
from hydrajax.grammar.schema_faults import JsonCheck

PROMPTS = [
    'import json\n\nprint(json.dumps(record))\n# prints\n"""\n',
    "# an example of the record:\nRECORD = ",
    "data = ",
]
BATCH = len(PROMPTS)
TREE = "chain-3"
DRAFTS = ("none", "lookahead", "draft-model", "lookup+hydra++")


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
    leaves = [
        *(_integer, _number, _string),
        lambda rng: {"const": rng.choice(VALUES)},
        lambda rng: {"enum": rng.sample(VALUES, rng.randint(1, 4))},
        lambda rng: {"type": "boolean"},
        lambda rng: {"type": [rng.choice(["integer", "boolean"]), "null"]},
    ]
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


@pytest.fixture(scope="module")
def models():
    """``models(draft)``: the bundled base with a draft, loaded once."""
    base, found = hydrajax.load("shipped"), {}

    def of(draft: str):
        if draft not in found:
            found[draft] = base if draft == "none" else base.with_draft(draft)
        return found[draft]

    return of


def executor_of(m, grammar, limit: int, forced_nodes: int):
    request = Request(max_new_tokens=limit, grammar=grammar)
    tree = TREE if m.drafter.spec.depth else "root"
    return m.executor(m.program(request, tree=tree, forced_nodes=forced_nodes), request)


def decoded(executor, grammars) -> list:
    requests = [executor.request.replace(grammar=grammar) for grammar in grammars]
    prompts = [PROMPTS[number % BATCH] for number in range(len(grammars))]
    return list(hydrajax.generate(executor, prompts, requests=requests, batch_size=BATCH))


def is_valid(value, schema) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value)


def without_draft(models, schemas: list[dict], limit: int) -> list:
    """Return the outputs of decoding one token at a time, each of which is valid or was cut at the limit."""
    grammars = [Grammar.json_schema(schema) for schema in schemas]
    found = decoded(executor_of(models("none"), grammars[0], limit, 0), grammars)
    for schema, result in zip(schemas, found, strict=True):
        assert result.steps == len(result.output_ids)
        if result.finish_reason == "eos":
            assert is_valid(json.loads(result.text), schema), (schema, result.text)
        else:
            assert (result.finish_reason, len(result.output_ids)) == ("length", limit), (schema, result.text)
    return found


def steps_of(models, schemas: list[dict], limit: int, draft: str, forced_nodes: int, expected: list) -> int:
    """Compare the outputs with a draft to those without; return the number of steps."""
    grammars = [Grammar.json_schema(schema) for schema in schemas]
    found = decoded(executor_of(models(draft), grammars[0], limit, forced_nodes), grammars)
    assert [one.output_ids for one in found] == [one.output_ids for one in expected], (draft, forced_nodes)
    return sum(one.steps for one in found)


def test_random_schemas_without_a_draft(models):
    rng = random.Random(0)
    found = without_draft(models, [random_schema(rng, 2) for _ in range(6)], 48)
    assert sum(one.finish_reason == "eos" for one in found) >= 4


def test_a_text_that_the_check_refuses_does_not_end_as_a_complete_one(models, monkeypatch):
    """Where nothing is allowed after a draft, the first token is drawn, which is EOS in this vocabulary."""
    assert models("none").eos_ids == (0,)
    monkeypatch.setattr(JsonCheck.__wrapped__, "__call__", lambda self, text: False)
    grammars = [Grammar.json_schema({"const": [1]})] * BATCH
    found = decoded(executor_of(models("none"), grammars[0], 48, 8), grammars)
    assert [(one.text, one.finish_reason) for one in found] == [("[1]", "grammar")] * BATCH


@pytest.fixture(scope="module")
def many(models):
    """201 schemas, and their outputs without a draft."""
    rng = random.Random(1)
    schemas = [random_schema(rng) for _ in range(201)]
    expected = without_draft(models, schemas, 192)
    print(Counter(one.finish_reason for one in expected), sum(one.steps for one in expected), "steps")
    assert sum(one.finish_reason == "eos" for one in expected) > 150
    return schemas, expected


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_many_random_schemas(models, many, draft):
    """201 schemas with each draft, with and without forced tokens: these need fewer steps, also next to a draft."""
    schemas, expected = many
    steps = [steps_of(models, schemas, 192, draft, nodes, expected) for nodes in (8, 0)]
    print(draft, steps)
    assert steps[0] < steps[1]
