"""Requests for structured output and tools that are refused, over a socket."""

import re
import sys

import httpx
import pytest

from helpers.json_letters import TOOLS
from helpers.serving import SECONDS, running

HELLO = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def address(json_pool):
    with running(json_pool, model="letters") as (at, _):
        yield at


def of(schema, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}}


def tool(**function) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "a"} | function}]}


def messages(*more) -> dict:
    return {"messages": [*HELLO, *more]}


CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def called(arguments: str) -> dict:
    return messages({"role": "assistant", "tool_calls": [CALL | {"function": {"name": "a", "arguments": arguments}}]})


WANTED_CHOICES = 'none, auto, required or {"type": "function", "function": {"name": ...}}'


REFUSED = [
    (of({"not": {}}), 'response_format.json_schema.schema: Unimplemented keys: ["not"]'),
    (of({"enum": []}), "response_format.json_schema.schema: Unsatisfiable schema"),
    (of({"type": "integer", "multipleOf": 2**31}), "response_format.json_schema.schema: takes more than 2 s"),
    (
        of({"properties": {"a": {}}, "patternProperties": {"^a": {}}}),
        "response_format.json_schema.schema: patternProperties: a pattern matches a name in properties",
    ),
    (of({"title": "a" * (1 << 17)}), "response_format.json_schema.schema: got more than 131072 bytes"),
    (of(3), "response_format.json_schema.schema: got 3, expected an object"),
    (of({}, x=1), "response_format.json_schema.x: this field is not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
        "response_format.json_schema: requires response_format.type=json_schema",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type: got 'xml', expected 'text', 'json_object', "),
    (
        {"response_format": {"type": "json_object", "format": {}}},
        "response_format.format: requires response_format.type=structural_tag",
    ),
    ({"structured_outputs": {}}, "structured_outputs: got none, expected one of json, regex, choice, grammar, "),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: got regex and choice, expected one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: "),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: got [], expected a list of texts"),
    ({"structured_outputs": {"json": "["}}, "structured_outputs.json: got a text that is not a JSON object"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar: Failed to convert the grammar"),
    ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern: this field is not"),
    (
        {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
        "guided_regex: got one with structured_outputs.regex",
    ),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens: got 1 with structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag.format.type: got"),
    (
        tool() | {"guided_regex": "a"},
        "guided_regex: got one with tools, expected JSON, or tool_choice none",
    ),
    (of({}) | {"ignore_eos": True}, "ignore_eos: got true with response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens: got 2 with response_format"),
    ({"tools": [{}]}, "tools.0.type: is missing"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type: got 'custom', expected 'function'"),
    (tool(name="a b"), "tools.0.function.name: got 'a b', expected 1 to 64 letters, digits, _ and -"),
    (tool(parameters={"type": "string"}), "tools.0.function.parameters.type: got 'string', expected 'object'"),
    (tool(parameters={"properties": {"a": False}, "required": ["a"]}), "tools.0.function.parameters: Unsat"),
    (tool(parameters={"not": {}}), 'tools.0.function.parameters: Unimplemented keys: ["not"]'),
    (tool(description="a</s>"), "tools: contains the special token </s>, expected plain text"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: got ab twice, expected different names"),
    (tool() | of({"not": {}}), 'response_format.json_schema.schema: Unimplemented keys: ["not"]'),
    (tool() | of({}) | {"min_tokens": 1}, "min_tokens: got 1 with tools"),
    (tool() | {"min_tokens": 1}, "min_tokens: got 1 with tools"),
    ({"tool_choice": "required"}, "tool_choice: requires tools"),
    (tool() | {"tool_choice": "any"}, f"tool_choice: got 'any', expected {WANTED_CHOICES}"),
    (
        tool() | {"tool_choice": {"type": "function", "function": {"name": "b"}}},
        "tool_choice.function.name: got 'b', expected one of: a",
    ),
    ({"functions": []}, "functions: got [], expected none; use tools, which replace it"),
    ({"function_call": "auto"}, "function_call: got 'auto', expected none; use tool_choice"),
    (messages({"role": "tool", "content": "a"}), "messages.1.tool_call_id: is missing"),
    (messages({"role": "user", "content": "a", "tool_call_id": "1"}), "messages.1.tool_call_id: requires role"),
    (messages({"role": "assistant", "content": None}), "messages.1.content: is missing"),
    (messages({"role": "user", "content": "a", "tool_calls": [CALL]}), "messages.1.tool_calls: got a list"),
    (called("[]"), "messages.1.tool_calls.0.function.arguments: got '[]', expected a JSON object as text"),
    (
        messages({"role": "tool", "content": "a", "tool_call_id": "</s>"}),
        "messages.1: contains the special token </s>, expected plain text",
    ),
    (called('{"</s>": 1}'), "messages.1: contains the special token </s>, expected plain text"),
]


def test_refusals(address):
    for body, message in REFUSED:
        answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO} | body, timeout=SECONDS)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert error["message"].startswith(message)
        assert error["param"] == message.split(":")[0].split(" ")[0]
        assert "\n" not in error["message"]


def test_llguidance_is_optional(address, monkeypatch):
    for body in [of({}), tool(parameters={}), tool()]:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO} | body, timeout=SECONDS)
        assert answer.status_code == 400
        wanted = r"[\w.]+: grammars need llguidance: pip install 'hydrajax\[grammar\]'"
        assert re.fullmatch(wanted, answer.json()["error"]["message"])
