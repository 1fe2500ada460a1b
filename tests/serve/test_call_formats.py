"""Every format of tool calls: texts written here, their grammar, their reader, and random texts of the grammar."""

import functools
import json
import random
import re
from dataclasses import dataclass

import jsonschema
import numpy as np
import pytest

from helpers.growing import streamed, whole
from helpers.json_letters import shipped_tokenizer
from hydrajax.decoding.constraints import WORD, allowed_next
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.schema_faults import JsonCheck
from hydrajax.serve.call_formats import FORMATS, NAMES, call_format, separate_tokens
from hydrajax.serve.protocol import ChatBody
from hydrajax.serve.structured import structure_of
from hydrajax.serve.tool_calls import Call, CallDeltas
from hydrajax.text.tokenizer import decode_text

OBJECT = {"k": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "t": {"type": "string", "maxLength": 4}}
PROPERTIES = {
    "s": {"type": "string", "minLength": 1, "maxLength": 20},
    "maybe": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
    "e": {"enum": ["x", 3, None, "long"], "maxLength": 2, "description": "not a keyword"},
    "o": {"type": "object", "properties": OBJECT, "required": ["t"], "additionalProperties": False},
    "p": {"type": "string", "pattern": "^[a-c]{2}/[0-9]$"},
    "i": {"$ref": "#/$defs/n"},
    "f": {"type": "number", "minimum": -2, "maximum": 2},
}
GET = {"type": "object", "properties": PROPERTIES, "required": ["s", "i"], "additionalProperties": False}
GET["$defs"] = {"n": {"type": "integer", "minimum": 0, "maximum": 11}}
TOOLS = {"get-1": GET, "none": {"type": "object", "additionalProperties": False}}
SHORT = {"s": "x", "i": 1}
CALLS = [
    ("get-1", SHORT),
    ("none", {}),
    (
        "get-1",
        {"s": 'é <"\\ x:\n}])', "maybe": None, "e": "x", "o": {"k": [True, False], "t": "a,:"}, "i": 11, "f": -1.5},
    ),
    ("get-1", {"s": "None", "maybe": '"q"', "e": None, "o": {"k": [], "t": ""}, "p": "ab/1", "i": 0}),
]
WRONG = [
    ("get", SHORT),
    ("get-1", {"s": "x"}),
    ("get-1", {"s": "x", "i": 12}),
    ("get-1", {"s": "x", "i": "one"}),
    ("get-1", {"s": "x" * 21, "i": 1}),
    ("get-1", {"s": "x", "e": "long", "i": 1}),
    ("get-1", {"s": "x", "o": {}, "i": 1}),
    ("get-1", {"s": "x", "p": "ab/12", "i": 1}),
    ("get-1", {"s": "x", "i": 1, "z": 1}),
    ("none", {"s": "x"}),
]


def in_json(key, name, arguments) -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def in_xml(name, arguments) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def in_python(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {in_python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(in_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def in_gemma(quote, value) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{in_gemma(quote, v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_gemma(quote, v) for v in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def of_gemma(begin, quote, end):
    return lambda calls: "".join(f"{begin}call:{name}{in_gemma(quote, values)}{end}" for name, values in calls)


@dataclass(frozen=True)
class Case:
    """A format: its name, what writes calls in it, its tokens, and a template that describes it."""

    name: str
    write: object
    tokens: tuple[str, ...] = ()
    described: str = ""
    several: bool = True
    after_text: bool = True


def in_expressions(calls) -> str:
    found = (f"{name}({', '.join(f'{k}={in_python(v)}' for k, v in values.items())})" for name, values in calls)
    return f"[{', '.join(found)}]"


TAGS, GEMMA = ("<tool_call>", "</tool_call>"), ("<|tool_call>", '<|"|>', "<tool_call|>")
FUNCTION_GEMMA = ("<start_function_call>", "<escape>", "<end_function_call>")
PYTHON, XML = ("<|python_start|>", "<|python_end|>"), "<tool_call>\n<function=f>\n<parameter=p>"
LLAMA = '{"name": name, "parameters": values}'


def in_tags(calls) -> str:
    return "\n".join(f"{TAGS[0]}\n{in_json('arguments', *call)}\n{TAGS[1]}" for call in calls)


def in_list(calls) -> str:
    return f"[TOOL_CALLS][{', '.join(in_json('arguments', *call) for call in calls)}]"


def by_name(calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(v, ensure_ascii=False)}" for name, v in calls)


CASES = [
    Case("hermes", in_tags, TAGS, "<tool_call>"),
    Case("qwen3_coder", lambda calls: "\n".join(in_xml(*call) for call in calls), TAGS, XML),
    Case("mistral", in_list, ("[TOOL_CALLS]",), "[TOOL_CALLS] ["),
    Case("mistral", by_name, ("[TOOL_CALLS]", "[ARGS]"), "'[TOOL_CALLS]' + name + '[ARGS]'"),
    Case("gemma4", of_gemma(*GEMMA), GEMMA, "'<|tool_call>call:' + name"),
    Case("functiongemma", of_gemma(*FUNCTION_GEMMA), FUNCTION_GEMMA, "'<start_function_call>call:' + name"),
    Case("llama3_json", lambda calls: in_json("parameters", *calls[0]), (), LLAMA, several=False, after_text=False),
    Case("llama4_pythonic", in_expressions, PYTHON, "[func_name1(a=1), func_name2(...)]", after_text=False),
]
WITH_TOKENS = [
    pytest.param(case, special, id=f"{case.name}{len(case.tokens)}-{['text', 'tokens'][special]}")
    for case in CASES
    for special in (False, True)
    if not (special and not case.tokens)
    if special or case.tokens != ("[TOOL_CALLS]", "[ARGS]")
]


def accepting(tokenizer, grammar):
    """Return what tells whether a grammar accepts a text, as `accepts` does; compiled once."""
    begin = grammar.start(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))

    def accepted(text: str) -> bool:
        matcher = begin.copy()
        matcher.follow(tokenizer(text, add_special_tokens=False)["input_ids"])
        word, bit = divmod(tokenizer.eos_token_id, WORD)
        return matcher.error is None and bool(allowed_next(matcher, len(tokenizer))[0, word] >> np.uint32(bit) & 1)

    return accepted


@functools.cache  # llguidance takes long to read a tokenizer
def tokenizer_with(tokens: frozenset[str]):
    return shipped_tokenizer(*sorted(tokens), special=True)


def form_of(case, special):
    """Return a format and a tokenizer, with the marks of several formats as special tokens or without any."""
    others = {mark for each in CASES for mark in each.tokens} - {"[ARGS]"}
    tokens = frozenset(others | set(case.tokens)) if special else frozenset()
    tokenizer = tokenizer_with(tokens)
    return tokenizer, FORMATS[case.name][0](separate_tokens(tokenizer), tokens)


@pytest.mark.parametrize(("case", "special"), WITH_TOKENS)
def test_calls(case, special):
    """The grammar accepts what is written here and nothing else; the reader returns it, whole and by characters."""
    tokenizer, form = form_of(case, special)
    lists = [CALLS, CALLS[1:3]] if case.several else []
    reader = form.reader(TOOLS)
    one = accepting(tokenizer, form.grammar(TOOLS))
    any_number = accepting(tokenizer, form.grammar(TOOLS, several=True, text=True))
    for calls in [*([call] for call in CALLS), *lists]:
        for before in ("", "So [\n") if case.after_text else ("",):
            text = before + case.write(calls)
            assert any_number(text), text
            assert one(text) == (before == "" and len(calls) == 1)
            content, found, _ = reader.read(text, True)
            assert [(call.name, json.loads(call.arguments), call.complete) for call in found] == [
                (*c, True) for c in calls
            ]
            assert content == before.rstrip()
            check_pieces(reader, text)
    for call in WRONG:
        assert not any_number(case.write([call])), call
    assert any_number(case.write([("get-1", {"s": "</parameter>", "i": 1})])) == (case.name != "qwen3_coder")
    assert not any_number(f"{case.write(CALLS[:1])} and")
    assert any_number("So é {\n")
    assert not one("So")


def check_pieces(reader, text):
    """Wherever a text ends, the pieces of its stream join to its calls, and no piece contains a mark."""
    deltas, content, joined = CallDeltas(reader), "", []
    for length in range(len(text) + 1):
        new, pieces = deltas.new(text[:length], False)
        content += new
        for piece in pieces:
            joined += [[piece["function"]["name"], ""]] if "id" in piece else []
            joined[piece["index"]][1] += piece["function"]["arguments"]
        ended = reader.read(text[:length], True)
        assert ended.content.startswith(content)
        assert joined == [[call.name, call.arguments] for call in ended.calls]
    assert ended.content == content
    assert deltas.complete


def required(form, tools):
    """Return the structure of a request that must call one of these tools."""
    tools = [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in tools.items()]
    body = ChatBody(model="m", messages=[{"role": "user", "content": "a"}], tools=tools, tool_choice="required")
    return structure_of(body, lambda forced: form)


def test_finished_calls_are_checked(monkeypatch):
    """By jsonschema, also if decoding leaves the marks out."""
    for case in (CASES[0], CASES[2]):
        for special in (False, True):
            tokenizer, form = form_of(case, special)
            text, accepts = case.write(CALLS[:1]), accepting(tokenizer, required(form, TOOLS).grammar)
            assert accepts(text)
            with monkeypatch.context() as patch:
                patch.setattr(JsonCheck.__wrapped__, "__call__", lambda self, text: False)
                assert not accepts(text)


@pytest.mark.parametrize(("case", "special"), WITH_TOKENS)
def test_random_texts_of_the_grammar(case, special):
    """All calls in them are valid under their schemas, whose check sees special tokens too."""
    tokenizer, form = form_of(case, special)
    structure, end = required(form, TOOLS), tokenizer.eos_token_id
    begin, chosen, called = structure.grammar.start(tokenizer, len(tokenizer), (end,)), random.Random(1), set()
    for _ in range(6):
        matcher, ids = begin.copy(), []
        while not ids or ids[-1] != end:
            assert len(ids) < 3000
            bits = allowed_next(matcher, len(tokenizer))[0]
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            ids.append(end if end in allowed and chosen.random() < 0.5 else int(chosen.choice(allowed)))
            matcher.follow(ids)
            assert matcher.error is None
        content, calls, _ = structure.calls.read(decode_text(tokenizer, ids[:-1], bool(form.special)), True)
        assert (content, bool(calls)) == ("", True)
        for call in calls:
            assert call.complete
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
            called |= json.loads(call.arguments).keys()
    assert len(called) > 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_formats_by_template_and_by_name(case):
    tokenizer, _ = form_of(case, True)
    forms = [call_format(f"{case.described}{{{{ tools }}}}", tokenizer), call_format("", tokenizer, case.name)]
    for form in forms:
        assert type(form) is FORMATS[case.name][0]
        assert form.read(case.write(CALLS[:1]), True).calls[0].name == "get-1"
    assert case.name in NAMES


@pytest.mark.parametrize("case", CASES[3:6], ids=lambda case: case.name)
def test_special_tokens_of_an_answer_are_read(case):
    """As decoding leaves them out; Mistral's ids have nine letters and digits."""
    tokenizer, form = form_of(case, True)
    ids = tokenizer(f"So{case.write(CALLS)}", add_special_tokens=False)["input_ids"]
    assert not any(token in decode_text(tokenizer, ids) for token in case.tokens)
    message, reader = whole(form.reader(TOOLS), tokenizer, ids), form.reader(TOOLS)
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert [(name, json.loads(arguments)) for name, arguments in found] == CALLS
    choice, parts, pieces = streamed(reader, tokenizer, ids)
    assert (parts["content"], message["content"], choice.finish_reason) == ("So", "So", "tool_calls")
    assert "".join(piece["function"]["arguments"] for piece in pieces) == "".join(arguments for _, arguments in found)
    nine = [re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) is not None for call in message["tool_calls"]]
    assert all(nine) if case.name == "mistral" else not any(nine)


def test_answers_of_json_or_calls():
    answer = {"type": "array", "items": {"type": "integer"}}
    for case in CASES:
        tokenizer, form = form_of(case, bool(case.tokens))
        accepts = accepting(tokenizer, form.grammar(TOOLS, answer=answer))
        for text, accepted in (("[1, 2]", True), ('["a"]', False), (case.write(CALLS[:1]), True), ("So", False)):
            assert accepts(text) == accepted, (case.name, text)


def test_schemas_that_a_format_cannot_follow():
    for name in ("qwen3_coder", "gemma4", "llama4_pythonic"):
        form = FORMATS[name][0]({})
        deep = {"properties": {"a": {"type": "object", "maxProperties": 1}}}
        for schema, what in ((deep, "maxProperties"), ({"anyOf": [{"required": ["a"]}]}, "anyOf")):
            if (name, what) == ("qwen3_coder", "maxProperties"):
                continue  # its values are JSON
            with pytest.raises(HydrajaxError, match=f"tools: got {what} in the parameters of f, which"):
                form.grammar({"f": {"type": "object"} | schema})
    for name, key in (("gemma4", "a:b"), ("llama4_pythonic", "a b"), ("qwen3_coder", "a>b")):
        with pytest.raises(HydrajaxError, match=f"tools: got the name '{key}' in the parameters of f"):
            FORMATS[name][0]({}).grammar({"f": {"type": "object", "properties": {key: {}}}})


def test_values_of_any_kind():
    values = {"a": {"b": [1, None, "c"], "d": {}}, "e": [], "f": True}
    for case in CASES:
        tokenizer, form = form_of(case, bool(case.tokens))
        tools = {"f": {"type": "object", "properties": {"a": {}, "e": {"type": ["array", "string"]}, "f": True}}}
        text = case.write([("f", values)])
        assert accepting(tokenizer, form.grammar(tools))(text), case.name
        assert form.reader(tools).read(text, True).calls == [Call("f", json.dumps(values), True)]
