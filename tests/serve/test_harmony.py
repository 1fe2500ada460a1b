"""The harmony format of gpt-oss: content, reasoning and calls of an answer, whole and in pieces, and its grammars."""

import dataclasses

import pytest

from helpers.growing import reply, result_of, streamed, whole
from helpers.json_letters import SCHEMAS, accepts, shipped_tokenizer
from hydrajax.serve.harmony import Harmony
from hydrajax.serve.protocol import ChatBody
from hydrajax.serve.structured import structure_of
from hydrajax.serve.tool_calls import Call

TEMPLATE = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
ANALYSIS = "<|channel|>analysis<|message|>so <b>é"
NEXT = "<|end|><|start|>assistant"
FINAL = f"{NEXT}<|channel|>final<|message|>a {{}}<|return|>"
JSON = '{"a": "ba"}'
CALL = f"<|channel|>commentary to=functions.ab <|constrain|>json<|message|>{JSON}<|call|>"
CASES = [  # an answer; its content, reasoning and calls
    (ANALYSIS + FINAL, "a {}", "so <b>é", []),
    (ANALYSIS + NEXT + CALL, "", "so <b>é", [Call("ab", JSON, True)]),
    (f" to=functions.ab<|channel|>commentary json<|message|>{JSON}<|call|>", "", "", [Call("ab", JSON, True)]),
    (f"<|channel|>commentary<|message|>I look{NEXT}{CALL}", "I look", "", [Call("ab", JSON, True)]),
    (f"{ANALYSIS}{NEXT}<|channel|>analysis to=python<|message|>1+1<|call|>", "", "so <b>é\n1+1", []),
    (
        f"<|channel|>commentary<|message|>{NEXT}<|channel|>commentary<|message|>{NEXT}{CALL}",
        "",
        "",
        [Call("ab", JSON, True)],
    ),
    (CALL[:-13], "", "", [Call("ab", '{"a": ', False)]),
    (ANALYSIS, "", "so <b>é", []),
    ("a {}<|return|>", "a {}", "", []),  # in no channel
    ("", "", "", []),
]


@pytest.fixture(scope="module")
def tokenizer():
    names = ("start", "channel", "message", "constrain", "end", "call", "return")
    return shipped_tokenizer(*(f"<|{name}|>" for name in names), special=True)


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CASES)
def test_an_answer_that_grows_token_by_token(tokenizer, text, content, reasoning, calls):
    """The pieces of a stream join to the parts of the whole answer, and no piece has a special token."""
    form = Harmony.of(TEMPLATE, tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    choice, parts, found = streamed(form, tokenizer, ids)
    assert parts == {"content": content, "reasoning_content": reasoning}
    arguments = "".join(piece["function"]["arguments"] for piece in found)
    assert ([found[0]["function"]["name"], arguments] if found else []) == [x for call in calls for x in call[:2]]
    expected = "tool_calls" if calls and calls[0].complete else "stop"
    assert choice.finish_reason == expected
    bodies = reasoning.split("\n") if reasoning else []
    assert choice.reasoning_tokens() == sum(
        len(tokenizer(body, add_special_tokens=False)["input_ids"]) for body in bodies
    )

    message = whole(form, tokenizer, ids)
    assert (message["content"] or "", message.get("reasoning_content", "")) == (content, reasoning)
    assert [call["function"]["arguments"] for call in message.get("tool_calls", [])] == [call[1] for call in calls]


def test_stop_strings_end_the_content(tokenizer):
    choice = reply(Harmony.of(TEMPLATE, tokenizer), tokenizer)
    ids = tokenizer(ANALYSIS + FINAL, add_special_tokens=False)["input_ids"]
    choice.handle.result = dataclasses.replace(result_of(tokenizer, ids, " {"), finish_reason="stop")
    assert choice.delta(True)[::5] == ("a", "so <b>é")


def test_grammars(tokenizer):
    form, ends = Harmony.of(TEMPLATE, tokenizer), tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    thought, call, final = ANALYSIS + NEXT, CALL[:-8], "<|channel|>final<|message|>"
    for kind, text, accepted in [
        ({}, call, True),
        ({}, thought + call, True),
        ({}, thought + call.replace("ba", "x"), False),  # against the schema
        ({}, thought + call.replace("ab", "c"), False),
        ({}, f"{thought}{final}a", False),
        ({"text": True}, f"{thought}{final}a", True),
        ({"text": True}, f"<|channel|>commentary<|message|>I look{NEXT}{call}", True),
        ({"text": True}, "a", False),
        ({"answer": SCHEMAS["a"]}, f'{thought}{final}{{"b": 3}}', True),
        ({"answer": SCHEMAS["a"]}, f"{thought}{final}a", False),
    ]:
        assert accepts(tokenizer, form.grammar(SCHEMAS, **kind), text, tuple(ends)) == accepted, (kind, text)


def test_every_chat_with_such_a_template_is_read(tokenizer):
    form, body = Harmony.of(TEMPLATE, tokenizer), {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert Harmony.of("<tool_call>", tokenizer) is None
    tools = [{"type": "function", "function": {"name": "ab", "parameters": SCHEMAS["ab"]}}]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS["a"]}}
    for more in ({}, {"tools": tools}, {"response_format": schema}, {"tools": tools, "response_format": schema}):
        found = structure_of(ChatBody(**body, **more), lambda forced: form, form)
        assert found.calls is form
        assert (found.grammar is None) == (not more)
    past = {"role": "assistant", "content": "a", "reasoning_content": "so"}
    (message,) = (m.plain() for m in ChatBody(model="m", messages=[past]).messages)
    assert message == past
