"""Grammars that are refused: schemas that llguidance mishandles or compiles for long; the check of finished texts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers import small_tokenizer
from hydrajax.decoding.constraints import allowed_next
from hydrajax.errors import HydrajaxError
from hydrajax.grammar import trial
from hydrajax.grammar.grammar import Grammar
from hydrajax.grammar.matcher import Matcher
from hydrajax.grammar.schema_faults import JsonCheck
from hydrajax.grammar.vocabulary import vocabulary_of

NULL, OF_A, OVERLAP = {"type": "null"}, {"patternProperties": {"^a": {}}}, "patternProperties: a pattern matches a name"
NAMED = {"properties": {"ab": NULL}}
OBJECT = {"type": "object", "additionalProperties": False}


def test_mishandled_schemas_are_refused_by_name():
    for schema, message in [
        (OBJECT | NAMED | OF_A, OVERLAP),
        (OBJECT | {"required": ["ab"]} | OF_A, OVERLAP),
        ({"items": {"allOf": [NAMED, OF_A]}}, OVERLAP),
        ({"$defs": {"a b": OF_A}, "properties": {"x": NAMED | {"$ref": "#/$defs/a%20b"}}}, OVERLAP),
        ({"anyOf": [NULL, OBJECT | NAMED | {"allOf": [{"anyOf": [NULL, OF_A]}]}]}, OVERLAP),
        (OBJECT | {"patternProperties": {"^a": {}, "b$": {}}}, "are not disjoint"),
        (OBJECT | {"additionalProperties": NULL, "minProperties": 2}, "minProperties: got 2, expected at most 1"),
        ({"type": "integer", "x-guidance": {"lenient": True}, "not": {"const": 1}}, "x-guidance: "),
        ({"type": "array", "prefixItems": [{}], "items": NULL, "additionalItems": False}, "prefixItems: "),
        ({"enum": [2**60 + 1]}, "const: got 1152921504606846977, expected at most 15 digits"),
        ({"const": 9347.891899370043}, "const: got 9347.891899370043, expected at most 15 digits"),
    ]:
        with pytest.raises(HydrajaxError, match=message):
            _ = Grammar.json_schema(schema).source


def test_similar_schemas_are_not():
    for schema in [
        OBJECT | OF_A,
        OBJECT | {"properties": {"id": NULL}, "required": ["id"]} | OF_A,
        {"properties": {"ab": OBJECT | {"patternProperties": {".*": NULL}}}},  # of another value
        {"properties": {"patternProperties": NULL, "ab": {"const": OF_A}, "x-guidance": NULL}},
        OBJECT | {"properties": {"a": NULL, "b": NULL}, "required": ["a"], "minProperties": 2},
        {"const": [-1.5, 1e22, 0.1, 10**18, 2**40]},
    ]:
        assert Grammar.json_schema(schema).source


def test_the_check_of_finished_texts():
    for schema, valid, invalid in [
        ({}, ["[1]", "1" * 5000, "[" * 5000 + "]" * 5000], ['{"a": 1, ', "", "[1]]"]),
        (OBJECT | NAMED, ["{}", '{"ab": null}'], ['{"b": 1}', '{"ab": 1}']),
        ({"type": "number", "multipleOf": 0.1}, ["0.3", "1e0"], ['"a"']),
        ({"type": "number", "exclusiveMinimum": 0.1}, ["0.10000000000000000001"], ["0.1"]),
        ({"pattern": "^(a+)+$", "maxLength": 90}, [f'"{"a" * 60}!"'], [f'"{"a" * 91}"']),  # llguidance's task
        ({"pattern": r"^\p{Lu}$", "format": "date"}, ['"A"'], []),
        (OBJECT | {"patternProperties": {r"^\p{Lu}": {}}}, ['{"A": 1}'], ["1"]),
        ({"$ref": "http://localhost:1/schema"}, ["1"], []),  # is not fetched
        ({"$schema": [], "type": "null"}, ["1"], ["[1"]),
        ({"minimum": 0, "exclusiveMinimum": True}, ["1"], ["-1"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [NULL]}, ["[null, 1]"], ["[1]"]),
        ({"items": {"enum": [f"{n}" for n in range(9000)]}}, [json.dumps(["8999"] * 4000)], []),  # takes too long
    ]:
        check = JsonCheck(json.dumps(schema))
        assert [check(text) for text in valid + invalid] == [True] * len(valid) + [False] * len(invalid)


def test_eos_does_not_follow_an_invalid_text():
    """llguidance would end a text here; the sequence ends with an error."""
    tokenizer, errors = small_tokenizer.byte_level(), []
    vocabulary, source = vocabulary_of(tokenizer, 320, (2,)), Grammar.choices(["[1]"]).source
    for is_valid in (None, lambda ids: tokenizer.decode(ids) == "[1]", lambda ids: False):
        matcher = Matcher(vocabulary, source, is_valid)
        matcher.follow(tokenizer.encode("[1]", add_special_tokens=False))
        allowed_next(matcher, 320)
        errors.append(matcher.error)
    assert errors == [None, None, "no token of the vocabulary can continue or end the text"]


LONG = {"type": "integer", "multipleOf": 2**31}
FINE = Grammar.choices(["a"])


def refused(grammar: Grammar) -> str:
    with pytest.raises(HydrajaxError) as error:
        _ = grammar.source
    return str(error.value)


DOUBLING = "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(60)) + '\nA60: "x"'


@pytest.mark.slow
def test_large_grammars_are_refused_before_the_first_token():
    properties = {f"p{n}": {} for n in range(2000)}
    for grammar, message in (
        (Grammar.lark(f"start: %json {json.dumps(LONG)}"), "takes more than 2 s or 1024 MB"),
        (Grammar.json_schema({"const": -(2**63)}), "takes more than"),  # ends the process of llguidance 1.9
        (Grammar.regex("a(b{1000}){1000}"), "too many expressions"),
        (Grammar.json_schema({"properties": properties, "type": "object"}), "Current row has"),
        (Grammar.lark(DOUBLING), "too big"),
    ):
        assert message in refused(grammar)
        assert FINE.source


def test_a_worker_may_be_killed():
    assert FINE.source
    os.kill(trial._worker.pid, signal.SIGKILL)
    assert Grammar.choices(["b"]).source
    killer = threading.Timer(0.3, lambda: os.kill(trial._worker.pid, signal.SIGKILL))
    killer.start()
    assert "takes more than" in refused(Grammar.json_schema(LONG | {"title": "b"}))
    killer.join()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for a process in /proc")
def test_the_worker_ends_with_a_parent_that_is_killed():
    code = "from hydrajax.grammar import trial as t; t.fault_of('start: /a/', '{}'); print(t._worker.pid, flush=True)"
    parent = subprocess.Popen([sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker = int(parent.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{worker}").exists()
