"""Formats of tool calls: the calls in a text, and the texts that a grammar of calls accepts."""

import pytest

from helpers.json_letters import END_TAG, SCHEMAS, TAG, accepts
from helpers.json_letters import shipped_tokenizer as tokenizers
from hydrajax.serve.call_formats import PlainCalls, TaggedCalls, call_format
from hydrajax.serve.tool_calls import Call, CallDeltas, CallsOrAnswer

BODY = '{"name": "ab", "arguments": {"a": "</tool_call>"}}'
CLOSED = f"{TAG}\n{BODY}\n{END_TAG}"
AB = Call("ab", '{"a": "</tool_call>"}', True)
TAGGED, PLAIN = TaggedCalls({}), PlainCalls({})
OR_JSON, PLAIN_OR_JSON = (CallsOrAnswer(form, form.heads(["ab", "b"]).values()) for form in (TAGGED, PLAIN))


def test_tagged_calls_in_a_text():
    for text, content, calls in [
        ("", "", []),
        (" a \n", " a \n", []),
        (CLOSED, "", [AB]),
        (f"\n\n a {CLOSED}", "\n\n a", [AB]),
        (f"{CLOSED}\n{CLOSED}", "", [AB, AB]),
        (f"a{CLOSED} b", "a", [AB]),
        (f"{TAG}{BODY}", "", [AB]),  # unclosed
        (f'a\n{TAG}\n{{"name": "ab", "arguments": {{"a": ', "a", [Call("ab", '{"a": ', False)]),
        (f'{TAG}{{"name": "ab", "arguments": {{"a"}}}}{END_TAG}', "", [Call("ab", '{"a"}}', False)]),  # wrong JSON
        (f'a {TAG}\n{{"na', "a", []),
        (f"a {TAG} b {END_TAG}", f"a {TAG} b {END_TAG}", []),
        (f"{CLOSED}\n{TAG} b {END_TAG}", "", [AB]),
        ("a <tool_ca", "a <tool_ca", []),
    ]:
        assert TAGGED.read(text, True)[:2] == (content, calls)


def test_plain_calls_in_a_text():
    for text, content, calls in [
        ('{"name": "a", "parameters": {"b": 1}}', "", [Call("a", '{"b": 1}', True)]),
        ('{"name": "a", "parameters": {"b": ', "", [Call("a", '{"b": ', False)]),
        ('{"b": 1}', '{"b": 1}', []),
        ('a {"name": "a", "parameters": {}}', 'a {"name": "a", "parameters": {}}', []),
    ]:
        assert PLAIN.read(text, True)[:2] == (content, calls)


def test_deltas_of_a_text_that_grows_by_characters():
    for form, text, content, calls in [
        (TAGGED, f"a <b\n {CLOSED}\n{CLOSED}", "a <b", [["ab", AB.arguments]] * 2),
        (TAGGED, f"{CLOSED}", "", [["ab", AB.arguments]]),
        (TAGGED, "a <tool_call", "a <tool_call", []),
        (PLAIN, '{"name": "a", "parameters": {"b": "}"}}', "", [["a", '{"b": "}"}']]),
        (PLAIN, "a {", "a {", []),
        (OR_JSON, f"{CLOSED}\n{CLOSED}", "", [["ab", AB.arguments]] * 2),
        (OR_JSON, f'{{"a": "{CLOSED}", "b": ""}} ', f'{{"a": "{CLOSED}", "b": ""}} ', []),
        (OR_JSON, "<tool", "<tool", []),
        (PLAIN_OR_JSON, '{"name": "ab", "parameters": {}}', "", [["ab", "{}"]]),
        (PLAIN_OR_JSON, '{"name": "a", "parameters": {}}', '{"name": "a", "parameters": {}}', []),
    ]:
        deltas, found, texts = CallDeltas(form), [], []
        for length in range(len(text) + 1):
            new, pieces = deltas.new(text[:length], False)
            texts.append(new)
            assert content.startswith("".join(texts))  # no part of a tag
            found += pieces
        new, pieces = deltas.new(text, True)
        assert "".join([*texts, new]) == content
        joined: list[list[str]] = []
        for piece in [*found, *pieces]:
            if "id" in piece:
                joined.append([piece["function"]["name"], ""])
            joined[piece["index"]][1] += piece["function"]["arguments"]
        assert joined == calls
        assert deltas.complete == bool(calls)


QWEN = r'{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}'
LLAMA = (
    """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}.' }}"""
)
HEAD, NAMED = '\n{"name": "ab", "arguments": ', f'{TAG}\n{{"name": "ab", "arguments": {{"a": "ba"}}}}\n{END_TAG}'
PLAIN_AB = '{"name": "ab", "parameters": {"a": "ba"}}'
ALWAYS, AUTO = {"text": False, "several": False}, {"text": True, "several": True}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/n"}}}
PERSON |= {"required": ["name", "age"], "additionalProperties": False, "$defs": {"n": {"type": "integer"}}}
OR_PERSON = {"answer": PERSON}


@pytest.fixture(scope="module", params=["text", "tokens", "special"])
def tagging(request):
    """The shipped tokenizer, which writes tags as text, and with tags and a mark of thoughts as tokens."""
    if request.param == "text":
        return tokenizers()
    found = tokenizers(TAG, END_TAG, special=request.param == "special")
    found.add_tokens("<think>")
    return found


def test_grammars_of_tagged_calls(tagging):
    """Every tokenizer writes tags in its own tokens."""
    for kind, text, accepted in [
        (ALWAYS, NAMED, True),
        (ALWAYS, f'{TAG}{HEAD}{{"a": "x"}}}}\n{END_TAG}', False),  # against the schema
        (ALWAYS, f'{TAG}\n{{"name": "c", "arguments": {{}}}}\n{END_TAG}', False),
        (ALWAYS, f"{NAMED}\n{NAMED}", False),
        (ALWAYS | {"several": True}, f"{NAMED}\n{NAMED}", True),
        (ALWAYS, "Hello", False),
        (ALWAYS, "", False),
        (AUTO, "", True),
        (AUTO, "Hello <b> {\n} <tool_ca", True),
        (AUTO, f"<think> so\n\n Hello {NAMED}", True),
        (AUTO, f"Hello {NAMED}\n{NAMED}", True),
        (AUTO, f"Hello {TAG} and", False),
        (AUTO, f'Hello {TAG}{HEAD}{{"a": "x"}}}}\n{END_TAG}', False),
        (AUTO, f"{NAMED} and", False),
        (OR_PERSON, NAMED, True),
        (OR_PERSON, '{"name": "ab", "age": 3}', True),
        (OR_PERSON, f'{{"name": "ab", "age": 3}}{NAMED}', False),
        (OR_PERSON, f'{TAG}{HEAD}{{"a": "x"}}}}\n{END_TAG}', False),
        (OR_PERSON, "Hello", False),
    ]:
        form = call_format(QWEN, tagging)
        assert isinstance(form, TaggedCalls)
        assert accepts(tagging, form.grammar(SCHEMAS, **kind), text) == accepted


def test_other_tokens_cannot_spell_a_tag_that_is_a_token():
    """Their call would follow no schema."""
    tokenizer, written = tokenizers(TAG, END_TAG), tokenizers()
    spelled = written(f"a {TAG}", add_special_tokens=False)["input_ids"]
    grammar = call_format(QWEN, tokenizer).grammar(SCHEMAS, **AUTO)
    matcher = grammar.start(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    matcher.follow(spelled[:-1])
    assert matcher.error is None
    matcher.follow(spelled)
    assert matcher.error is not None


def test_grammars_of_plain_calls():
    for kind, text, accepted in [
        (ALWAYS, PLAIN_AB, True),
        (ALWAYS, f"<|python_tag|>{PLAIN_AB}", True),
        (ALWAYS, '{"name": "ab", "parameters": {"a": 1}}', False),
        (ALWAYS, f"{PLAIN_AB}{PLAIN_AB}", False),
        (ALWAYS, "Hello", False),
        (AUTO, PLAIN_AB, True),
        (AUTO, 'Hello {"a": 1}', True),
        (AUTO, '{"a": 1}', False),
        (AUTO, f" {PLAIN_AB}", False),  # a space that the first token may have
        (OR_PERSON, PLAIN_AB, True),
        (OR_PERSON, f"<|python_tag|>{PLAIN_AB}", True),
        (OR_PERSON, '{"name": "ab", "parameters": {"a": 1}}', False),
        (OR_PERSON, '{"name": "ab", "age": 3}', True),
        (OR_PERSON, '{"name": "abc", "age": 3}', True),
        (OR_PERSON, "Hello", False),
    ]:
        tokenizer = tokenizers("<|python_tag|>", special=True)
        form = call_format(LLAMA, tokenizer)
        assert isinstance(form, PlainCalls)
        assert accepts(tokenizer, form.grammar(SCHEMAS, **kind), text) == accepted
