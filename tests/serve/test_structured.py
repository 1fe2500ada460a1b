"""Structured output and tool calls over a socket, with OpenAI's client; every finished answer against jsonschema."""

import asyncio
import json
import re
from typing import Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from helpers import json_letters, letters
from helpers.json_letters import IDS, NUMBER, SCHEMAS, TAG, TOOLS
from helpers.serving import SECONDS, running
from hydrajax.grammar.grammar import Grammar
from hydrajax.grammar.schema_faults import JsonCheck
from hydrajax.serve import default_tools
from hydrajax.serve.reasoning import MARKS
from hydrajax.serve.request_encoder import RequestEncoder

HELLO = [{"role": "user", "content": "ab"}]
CLOSED = {"additionalProperties": False}
BEGIN, NEVER = {str(IDS[TAG]): 100}, {str(IDS[TAG]): -100}  # biases
ONE = {"model": "letters", "messages": HELLO, "max_completion_tokens": 60}


@pytest.fixture(scope="module")
def address(json_pool):
    with running(json_pool, model="letters") as (at, _):
        yield at


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS)


class Answer(pydantic.BaseModel):
    a: Literal["ab", "ba"]
    b: int = pydantic.Field(ge=0, le=11)


SCHEMA_OF_ANSWER = {"name": "n", "schema": Answer.model_json_schema()}


def test_the_client_parses_a_pydantic_model(client):
    found = client.chat.completions.parse(**ONE, response_format=Answer, n=4, temperature=9.0, seed=1)
    answers = [choice.message.parsed for choice in found.choices]
    assert all(isinstance(answer, Answer) for answer in answers)
    assert len({answer.model_dump_json() for answer in answers}) > 1
    assert [choice.finish_reason for choice in found.choices] == ["stop"] * 4


def test_a_schema_is_followed_with_and_without_strict(client):
    for strict in [True, False]:
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER, "strict": strict}}
        ends = {"logit_bias": {str(IDS["}"]): 5}}  # NUMBER allows further properties
        whole = client.chat.completions.create(**ONE, **ends, response_format=wanted)
        assert whole.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(whole.choices[0].message.content), NUMBER)
        events = client.chat.completions.create(**ONE, **ends, response_format=wanted, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content


def test_any_object(client):
    """A bias applies among the tokens that the grammar allows."""
    for wanted in [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}]:
        found = client.chat.completions.create(**ONE, response_format=wanted, logit_bias={str(IDS["}"]): 100})
        assert found.choices[0].message.content == "{}"
        found = client.chat.completions.create(
            **ONE | {"max_completion_tokens": 30}, response_format=wanted, n=3, temperature=2.0, seed=2,
            logit_bias={str(IDS[token]): bias for token, bias in (("}", 2), ('"', 1), ("a", -1))},
        )  # fmt: skip
        texts = [choice.message.content for choice in found.choices if choice.finish_reason == "stop"]
        assert texts
        assert all(isinstance(json.loads(text), dict) for text in texts)


def test_text_is_not_constrained(client):
    free = client.chat.completions.create(**ONE)
    assert client.chat.completions.create(**ONE, response_format={"type": "text"}).choices == free.choices


def test_bad_words_of_several_tokens(address):
    """They need no grammar, and hold under one."""
    letters_only = [IDS[letter] for letter in "ab01"]

    def text(**fields):
        body = {"prompt": "ab", "max_tokens": 30, "ignore_eos": True, "allowed_token_ids": letters_only} | fields
        return httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS).json()["choices"][0]["text"]

    free = text()
    words = [free[3:5], free[6:9]]
    found = text(bad_words=words)
    assert set(found) <= set("ab01")
    assert not any(word in found for word in words)
    grammar = {"structured_outputs": {"regex": "[ab]{9}"}, "ignore_eos": None, "allowed_token_ids": None}
    free = text(**grammar)
    found = text(**grammar, bad_words=[free[2:4]])
    assert free[2:4] not in found
    assert re.fullmatch("[ab]{9}", found)


BOUND = {"type": "object", "properties": {"a": {"enum": ["ab", "ba"]}}, "required": ["a"], **CLOSED}
TAGGED = {"begin": "a:", "schema": BOUND, "end": ","}
SEVERAL = {"type": "tags_with_separator", "separator": "0", "at_least_one": True}
SEVERAL["tags"] = [{"type": "tag", "begin": "a:", "content": {"type": "json_schema", "json_schema": BOUND}, "end": ","}]
OF_BOUND = r'\{"a": "(ab|ba)"\}'
FORMS = [  # fields, and a regular expression of their answers
    ({"structured_outputs": {"json": BOUND}}, OF_BOUND),
    ({"structured_outputs": {"json": json.dumps(BOUND), "disable_any_whitespace": True}}, OF_BOUND),
    ({"structured_outputs": {"regex": "[ab]{2}(0|1)"}}, "[ab]{2}[01]"),
    ({"structured_outputs": {"choice": ["ab0", "ba1"], "json": None}}, "ab0|ba1"),
    ({"structured_outputs": {"grammar": 'root ::= "a" x "b"\nx ::= [01] | "1" x'}}, "a1*[01]b"),
    ({"structured_outputs": {"grammar": 'start: "a" X "b"\nX: /1*[01]/'}}, "a1*[01]b"),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": SEVERAL})}}, f"a:{OF_BOUND},(0a:{OF_BOUND},)*"),
    ({"response_format": {"type": "structural_tag", "format": SEVERAL}}, f"a:{OF_BOUND},(0a:{OF_BOUND},)*"),
    (
        {"response_format": {"type": "structural_tag", "structures": [TAGGED], "triggers": ["a"]}},
        f"([^a]*a:{OF_BOUND},)*[^a]*",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BOUND}}}, OF_BOUND),
    ({"guided_json": BOUND}, OF_BOUND),
    ({"guided_regex": "[ab]{2}(0|1)"}, "[ab]{2}[01]"),
    ({"guided_choice": ["ab0", "ba1"]}, "ab0|ba1"),
    ({"guided_grammar": 'root ::= "a" x "b"\nx ::= [01] | "1" x'}, "a1*[01]b"),
]


def test_grammars_of_vllm_in_chats_and_completions(address):
    for fields, pattern in FORMS:
        for route, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "ab"})):
            body = prompt | fields | {"max_tokens": 60, "logit_bias": {str(letters.END): 4, str(IDS["b"]): 1}}
            answer = httpx.post(f"{address}/v1/{route}", json=body, timeout=SECONDS).json()
            choice = answer["choices"][0]
            text = choice["text"] if route == "completions" else choice["message"]["content"]
            assert choice["finish_reason"] == "stop", (fields, text)
            assert re.fullmatch(pattern, text), (fields, text)


def checked(message, allowed=tuple(SCHEMAS)) -> list[str]:
    """Check the calls of a message and return their names."""
    for call in message.tool_calls:
        assert (call.type, call.function.name in allowed) == ("function", True)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return [call.function.name for call in message.tool_calls]


def test_required_calls_one_of_the_tools(client):
    found = client.chat.completions.create(
        **ONE, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=6, temperature=1.5, seed=3
    )
    names = [checked(choice.message) for choice in found.choices]
    assert all(len(calls) == 1 for calls in names)
    assert len({calls[0] for calls in names}) > 1
    for choice in found.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_a_named_tool_is_called_once(client):
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        found = client.chat.completions.create(**ONE, tools=TOOLS, tool_choice=choice).choices[0]
        assert checked(found.message) == [name]
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)


def test_several_calls_and_their_limit(client):
    """Without EOS the answer continues until the limit; then the last call may be incomplete."""
    more = {"tools": TOOLS[2:], "tool_choice": "required", "logit_bias": {str(letters.END): -100}}
    found = client.chat.completions.create(**ONE, **more).choices[0]
    first, second, *_ = (call.function for call in found.message.tool_calls)
    assert (first.name, first.arguments, second.name, second.arguments) == ("b", "{}", "b", "{}")
    assert found.finish_reason == "length"


def test_calls_that_are_cut_off_end_with_length(client):
    choice = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ab"}}}
    whole = client.chat.completions.create(**ONE, **choice).choices[0].message.tool_calls[0].function.arguments
    found = client.chat.completions.create(**ONE | {"max_completion_tokens": 27}, **choice).choices[0]
    assert found.finish_reason == "length"
    arguments = found.message.tool_calls[0].function.arguments
    assert whole.startswith(arguments)
    assert 0 < len(arguments) < len(whole)


def test_auto_answers_or_calls(client):
    """Text before a call remains; arguments follow their schema from the first tag on."""
    auto = {"tools": TOOLS, "parallel_tool_calls": False}
    called = client.chat.completions.create(**ONE, **auto, logit_bias=BEGIN).choices[0]
    assert len(checked(called.message)) == 1
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    free = client.chat.completions.create(**ONE, **auto, tool_choice="auto", logit_bias=NEVER).choices[0]
    assert (free.message.tool_calls, free.finish_reason in ("stop", "length")) == (None, True)
    some = {str(IDS[TAG]): 2.5, str(letters.END): -100}  # so that a few texts precede a call
    mixed = client.chat.completions.create(**ONE, **auto, logit_bias=some, n=6, temperature=1.0, seed=4)
    texts = [choice.message.content for choice in mixed.choices if choice.finish_reason == "tool_calls"]
    assert any(texts)
    assert not any(text and (TAG in text or text != text.rstrip()) for text in texts)
    for choice in mixed.choices:
        if choice.finish_reason == "tool_calls":
            assert len(checked(choice.message)) == 1


def test_auto_with_a_response_format_calls_or_answers_in_json(client):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    either = ONE | {"tools": strict, "parallel_tool_calls": False, "response_format": Answer, "temperature": 1.0}
    for bias, calls in ((NEVER, False), (BEGIN, True)):
        settings = either | {"n": 3, "seed": 6, "logit_bias": bias}
        whole = client.chat.completions.parse(**settings).choices
        with client.chat.completions.stream(**settings) as stream:
            streamed = stream.get_final_completion().choices
        for one, other in zip(whole, streamed, strict=True):
            assert one.finish_reason == other.finish_reason == ("tool_calls" if calls else "stop")
            if calls:
                assert (one.message.content, checked(one.message, ("ab",))) == (None, ["ab"])
                functions = [found.message.tool_calls[0].function for found in (one, other)]
                assert functions[0].arguments == functions[1].arguments
            else:
                assert (one.message.tool_calls or [], one.message.content) == ([], other.message.content)
                assert isinstance(one.message.parsed, Answer)
    mixed = client.chat.completions.parse(**either | {"n": 8, "seed": 7, "temperature": 9.0})
    assert {choice.finish_reason for choice in mixed.choices} == {"stop", "tool_calls"}
    required = client.chat.completions.parse(**either | {"tool_choice": "required", "logit_bias": NEVER})
    assert required.choices[0].finish_reason == "tool_calls"


def test_none_calls_no_tool_and_leaves_them_out_of_the_prompt(client):
    free = client.chat.completions.create(**ONE, logit_bias=BEGIN)
    found = client.chat.completions.create(**ONE, logit_bias=BEGIN, tools=TOOLS, tool_choice="none")
    assert (found.choices, found.usage.prompt_tokens) == (free.choices, free.usage.prompt_tokens)
    assert TAG in found.choices[0].message.content


def test_streamed_deltas_join_to_the_whole_answer(client):
    for more in [
        {"tool_choice": "required", "temperature": 1.3, "seed": 5, "n": 3, "logprobs": True},
        {"tool_choice": "auto", "temperature": 1.0, "seed": 4, "n": 4, "logit_bias": {str(IDS[TAG]): 2.5}},
        {"tool_choice": "required", "logit_bias": {str(letters.END): -100}},
    ]:
        whole = client.chat.completions.create(**ONE, **more, tools=TOOLS)
        found = [{"content": "", "calls": [], "finish_reason": None, "logprobs": 0} for _ in whole.choices]
        for event in client.chat.completions.create(**ONE, **more, tools=TOOLS, stream=True):
            for choice in event.choices:
                mine = found[choice.index]
                mine["content"] += choice.delta.content or ""
                mine["finish_reason"] = choice.finish_reason
                mine["logprobs"] += len(choice.logprobs.content) if choice.logprobs else 0
                for piece in choice.delta.tool_calls or ():
                    if piece.id is not None:  # the first piece of a call has its id, type and name
                        assert (piece.index, piece.type) == (len(mine["calls"]), "function")
                        mine["calls"].append([piece.function.name, ""])
                    assert piece.function.name is None or piece.id is not None
                    mine["calls"][piece.index][1] += piece.function.arguments
        for mine, choice in zip(found, whole.choices, strict=True):
            functions = [call.function for call in choice.message.tool_calls or ()]
            assert mine["calls"] == [[function.name, function.arguments] for function in functions]
            assert (mine["content"], mine["finish_reason"]) == (choice.message.content or "", choice.finish_reason)
            assert mine["logprobs"] == (len(choice.logprobs.content) if "logprobs" in more else 0)
        assert any(mine["calls"] for mine in found)


def test_the_client_joins_the_stream_and_parses_the_arguments(client):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    settings = ONE | {"tools": strict, "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = client.chat.completions.create(**settings).choices[0].message.tool_calls
    with client.chat.completions.stream(**settings) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)
    assert call.function.parsed_arguments == json.loads(whole.function.arguments)
    call.id = "call_1"  # the prompt holds it, and after a random one the model may end at once
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    again = client.chat.completions.create(**ONE | {"messages": [*HELLO, message, result]})  # with its own fields
    assert again.choices[0].message.content


def test_calls_and_their_results_return_to_the_model(client, json_pool):
    """The client sends the message back as it came; the prompt is the one that transformers renders."""
    asked = client.chat.completions.create(**ONE, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    message, tokenizer = asked.choices[0].message, json_pool.executor.tokenizer
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "01"}
    found = client.chat.completions.create(**ONE | {"messages": [*HELLO, message, result]}, tools=TOOLS)
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    conversation = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, result]
    ids = tokenizer.apply_chat_template(conversation, tools=TOOLS, tokenize=True, return_dict=False)
    assert found.usage.prompt_tokens == len(ids)
    encoder = RequestEncoder(tokenizer, json_pool.executor.model.config)
    assert encoder.conversation(conversation, TOOLS)[0].tolist() == ids
    assert IDS[TAG] in ids


def test_calls_of_llama(json_pool, monkeypatch):
    monkeypatch.setattr(json_pool.executor.tokenizer, "chat_template", json_letters.LLAMA)
    with running(json_pool, model="letters") as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS)
        found = client.chat.completions.create(**ONE, tools=TOOLS, tool_choice="required").choices[0]
        assert len(checked(found.message)) == 1
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        begin = {"tools": TOOLS, "logit_bias": {str(IDS["{"]): 100}, "stream": True}
        events = [event.choices[0].delta for event in client.chat.completions.create(**ONE, **begin)]
        assert not any(event.content for event in events)
        pieces = [piece.function for event in events for piece in event.tool_calls or ()]
        jsonschema.validate(json.loads("".join(piece.arguments for piece in pieces)), SCHEMAS[pieces[0].name])
        answer = {"type": "json_schema", "json_schema": {"name": "n", "schema": Answer.model_json_schema() | CLOSED}}
        found = client.chat.completions.create(**ONE, tools=TOOLS, response_format=answer).choices[0]
        Answer.model_validate_json(found.message.content)
        with pytest.raises(openai.BadRequestError, match="response_format: allows JSON that begins as a call of ab"):
            client.chat.completions.create(**ONE, tools=TOOLS, response_format={"type": "json_object"})
        never = {"tools": TOOLS, "logit_bias": {str(IDS["{"]): -100}}
        message = client.chat.completions.create(**ONE, **never).choices[0].message
        assert (message.tool_calls, bool(message.content)) == (None, True)


def test_reasoning_is_free_and_the_content_follows_the_grammar(json_pool, monkeypatch):
    """As R1's, the template opens the reasoning. The tokens ``name`` and ``parameters`` are the marks."""

    def thought(message) -> str:
        return getattr(message, "reasoning", "")

    monkeypatch.setitem(MARKS, "qwen3", ("name", "parameters", ""))
    template = json_letters.HERMES + "{% if add_generation_prompt and enable_thinking is not false %}name{% endif %}"
    monkeypatch.setattr(json_pool.executor.tokenizer, "chat_template", template)
    with running(json_pool, model="letters", reasoning_parser="qwen3") as (address, _):
        create = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS).chat.completions.create
        bias = {"logit_bias": {str(IDS["parameters"]): 2, str(letters.END): -2}}
        more = ONE | bias | {"n": 6, "temperature": 1.0, "seed": 3, "max_completion_tokens": 70}
        free, hidden = create(**more), create(**more, extra_body={"include_reasoning": False})
        required = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        ended = 0
        for form in ({"response_format": {"type": "json_schema", "json_schema": SCHEMA_OF_ANSWER}}, required):
            found = create(**more, **form)
            assert 0 < found.usage.completion_tokens_details.reasoning_tokens < found.usage.completion_tokens
            for choice, other in zip(found.choices, free.choices, strict=True):
                message = choice.message
                assert thought(message) == getattr(message, "reasoning_content", "")
                assert form is required or thought(message) == thought(other.message)  # tools are in the prompt
                if choice.finish_reason == "tool_calls":
                    ended += len(checked(message))
                elif message.content and choice.finish_reason == "stop":
                    ended += bool(Answer.model_validate_json(message.content))
            texts = [{"reasoning": "", "content": ""} for _ in found.choices]
            for event in create(**more, **form, stream=True):
                for choice in event.choices:
                    for name, pieces in texts[choice.index].items():
                        texts[choice.index][name] = pieces + (getattr(choice.delta, name, None) or "")
            messages = [choice.message for choice in found.choices]
            assert texts == [{"reasoning": thought(one), "content": one.content or ""} for one in messages]
        assert ended > 6
        for choice, other in zip(hidden.choices, free.choices, strict=True):
            assert not hasattr(choice.message, "reasoning")
            assert choice.message.content == other.message.content
        off = create(**more, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert not any(hasattr(choice.message, "reasoning") for choice in off.choices)
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs: got thinking"):
            create(**more, extra_body={"chat_template_kwargs": {"thinking": False}})


def test_an_invalid_answer_is_an_error(client, monkeypatch):
    """The check finds no fault of llguidance today, so a text that it accepts is called invalid."""
    for wanted in [
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS[2:], "tool_choice": "required", "parallel_tool_calls": False},
    ]:
        monkeypatch.setattr(JsonCheck.__wrapped__, "__call__", lambda self, text: False)
        with pytest.raises(openai.BadRequestError, match=r": no token of the vocabulary can continue or end"):
            client.chat.completions.create(**ONE, **wanted, logit_bias={str(IDS["}"]): 100})


def test_grammars_are_compiled_outside_the_event_loop(client, monkeypatch):
    start, in_loop = Grammar.start, []

    def observed(*arguments):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            in_loop.append(False)
        else:
            in_loop.append(True)
        return start(*arguments)

    monkeypatch.setattr(Grammar, "start", observed)
    client.chat.completions.create(**ONE, tools=TOOLS, tool_choice="required")
    assert in_loop == [False]


def test_tools_of_templates_without_tools(json_pool, monkeypatch):
    """The server describes the tools; the description of a real base would fill the tiny one's context."""
    monkeypatch.setattr(default_tools, "DESCRIPTION", "ab")
    monkeypatch.setattr(json_pool.executor.tokenizer, "chat_template", letters.TEMPLATE)
    named = {"type": "function", "function": {"name": "b"}}
    with running(json_pool, model="letters") as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS)
        asked = ONE | {"tools": TOOLS, "parallel_tool_calls": False}
        for choice, bias, count in (("required", {}, 1), (named, {}, 1), ("auto", BEGIN, 1), ("auto", NEVER, 0)):
            found = client.chat.completions.create(**asked, tool_choice=choice, logit_bias=bias).choices[0]
            assert len(found.message.tool_calls or ()) == count
            assert (found.finish_reason == "tool_calls") == bool(count)
            if count:
                names, message = checked(found.message), found.message
                assert choice is not named or names == ["b"]
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "01"}
        again = client.chat.completions.create(**asked | {"messages": [*HELLO, message, result]}, logit_bias=NEVER)
        assert again.choices[0].message.content


def test_templates_with_tools_in_another_form(json_pool, monkeypatch):
    """Forced calls have the form of the grammar."""
    unknown = "tools: the chat template describes calls in an unknown format; start the server with --tool-parser"
    ignored = "tools: the chat template ignores tools; leave them out"
    for template, message in (
        ("{# tools #}", ignored),
        ("{{ tools }}", unknown),
        ("<tool_call><arg_key>{{ tools }}", unknown),
    ):
        monkeypatch.setattr(json_pool.executor.tokenizer, "chat_template", letters.TEMPLATE + template)
        with running(json_pool) as (address, _):
            body = {"messages": HELLO, "max_tokens": 60, "tools": [{"type": "function", "function": {"name": "a"}}]}
            answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=SECONDS)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)
            if message == unknown:
                body |= {"tool_choice": {"type": "function", "function": {"name": "a"}}}
                (choice,) = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=SECONDS).json()["choices"]
                assert [call["function"] for call in choice["message"]["tool_calls"]] == [
                    {"name": "a", "arguments": "{}"}
                ]


def test_the_responses_api(client):
    """A pydantic model, and a call whose result continues the stored response; streams have the same items."""
    own = {"model": "letters", "input": "ab", "max_output_tokens": 60}
    assert isinstance(client.responses.parse(**own, text_format=Answer).output_parsed, Answer)
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS[:1]]
    more = {"tools": tools, "tool_choice": {"type": "function", "name": "ab"}}
    called = client.responses.create(**own, **more)
    [call] = called.output
    assert (called.status, call.type, call.name) == ("completed", "function_call", "ab")
    jsonschema.validate(json.loads(call.arguments), SCHEMAS["ab"])
    assert (called.tools[0].to_dict(), called.tool_choice.to_dict()) == (tools[0], more["tool_choice"])
    with client.responses.stream(**own, **more) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == stream.get_final_response().output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "b"}
    after = client.responses.create(
        **own | {"input": [result]}, previous_response_id=called.id, tools=tools, tool_choice="none"
    )
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function",
                                              "function": {"name": "ab", "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "b"},
    ]  # fmt: skip
    chat = client.chat.completions.create(model="letters", messages=messages, max_completion_tokens=60, temperature=0)
    assert after.output_text == chat.choices[0].message.content
    cut = client.responses.create(**own | {"max_output_tokens": 27}, **more)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"
    with pytest.raises(openai.BadRequestError, match=r"text.format.schema: .*not"):
        client.responses.create(**own, text={"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}})
    with pytest.raises(openai.BadRequestError, match=r"tools.0.parameters.type: got 'array', expected 'object'"):
        client.responses.create(**own, tools=[tools[0] | {"parameters": {"type": "array"}}])
