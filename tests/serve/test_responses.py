"""The Responses API over a socket, with OpenAI's client; its types parse every response and every event."""

import json
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from helpers.serving import AUTHORISED, KEY, SECONDS, expected
from hydrajax.serve.draft_counts import DraftCounts
from hydrajax.serve.protocol import parse_body
from hydrajax.serve.replies import Delta
from hydrajax.serve.response_store import ResponseStore
from hydrajax.serve.responses import ResponsesFormat
from hydrajax.serve.responses_body import ITEMS, ItemReference, MessageItem, ResponsesBody

EVENT = TypeAdapter(ResponseStreamEvent)
EXTRAS = {
    "hydrajax",
    "metrics",
    "store",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
    "bytes",
    "name",
}  # beyond OpenAI's types
LOGPROBS = ["message.output_text.logprobs"]
ONE = {"model": "letters", "max_output_tokens": 25}


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, timeout=SECONDS)


def strictly(kind, found):
    """Parse with OpenAI's types; fields that these lack must be known extensions."""
    parsed = kind.validate_python(found) if isinstance(kind, TypeAdapter) else kind.model_validate(found)

    def check(value):
        if isinstance(value, list):
            [check(each) for each in value]
        elif hasattr(value, "model_extra"):
            assert set(value.model_extra or ()) <= EXTRAS, value
            [check(each) for each in vars(value).values()]

    check(parsed)
    return parsed


def events_of(answer: httpx.Response) -> list:
    """Return the events of a stream, numbered, each with its type before its data."""
    blocks = [block.split("\ndata: ") for block in answer.text.rstrip("\n").split("\n\n")]
    found = [strictly(EVENT, json.loads(data)) for _, data in blocks]
    assert [f"event: {event.type}" for event in found] == [head for head, _ in blocks]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def test_a_response_is_the_answer_of_generate(served, address, client):
    (wanted,) = expected(served, [served.tokenizer.encode("be a bad cafe ")], limit=25)
    more = {"instructions": "be a", "include": LOGPROBS, "metadata": {"a": "b"}}
    found = client.responses.create(**ONE, input="bad cafe", **more)
    assert found.output_text == wanted.text
    assert found.status == {"eos": "completed", "length": "incomplete"}[wanted.finish_reason]
    assert (found.usage.output_tokens, found.usage.input_tokens) == (wanted.new_tokens, 14)
    assert (found.instructions, found.metadata, found.temperature) == ("be a", {"a": "b"}, 0)
    scored = found.output[0].content[0].logprobs
    assert "".join(token.token for token in scored) == wanted.text
    assert [token.logprob for token in scored] == pytest.approx(wanted.logprobs[: len(scored)], abs=1e-3)
    stored = httpx.get(f"{address}/v1/responses/{found.id}", headers=AUTHORISED)
    assert strictly(Response, stored.json()).to_dict() == found.to_dict()
    body = ONE | more | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "bad cafe"}]}]}
    events = events_of(httpx.post(f"{address}/v1/responses", json=body | {"stream": True}, headers=AUTHORISED))
    first, last = events[:4], events[-4:]
    assert [event.type.removeprefix("response.") for event in (*first, *last)] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.done", "content_part.done", "output_item.done", found.status,
    ]  # fmt: skip
    assert "".join(event.delta for event in events[4:-4]) == last[0].text == wanted.text
    assert last[-1].response.output[0].content == found.output[0].content


def test_a_conversation_continues_a_stored_response(address, client):
    first = client.responses.create(**ONE, input="abc", instructions="be a")
    again = client.responses.create(**ONE, input="deaf", previous_response_id=first.id)
    whole = [{"role": "user", "content": "abc"}, *first.output, {"role": "user", "content": "deaf"}]
    assert again.output_text == client.responses.create(**ONE, input=whole, store=False).output_text
    referred = [whole[0], {"type": "item_reference", "id": first.output[0].id}, whole[2]]
    with client.responses.stream(**ONE, input=referred) as stream:
        assert list(stream)[-1].response.output_text == again.output_text
    third = client.responses.create(**ONE, input="a", previous_response_id=again.id)
    assert third.usage.input_tokens > again.usage.input_tokens + 2
    client.responses.delete(first.id)
    for wrong, field in (
        ({"previous_response_id": first.id}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": first.output[0].id}]}, "input.0.id"),
        ({"previous_response_id": client.responses.create(**ONE, input="a", store=False).id}, "previous_response_id"),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(**ONE | {"input": "a"} | wrong)
        assert error.value.param == field
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert httpx.get(f"{address}/v1/responses/{again.id}").status_code == 401
    assert httpx.post(f"{address}/v1/responses", json=ONE).status_code == 401


REFUSED = [
    ({"input": []}, "input: got [], expected at least 1 item"),
    ({"input": [{"type": "computer_call"}]}, 'input.0: got {"type": "computer_call"}, expected a message'),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
     "input.0.content.0.type: got 'input_image', expected 'input_text', 'output_text' or 'text', as this server takes"),
    ({"input": "a</s>"}, "input: contains the special token </s>"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: got 'web_search', expected 'function'"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice: got {"),
    ({"tool_choice": "required"}, "tool_choice: requires tools"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: is missing"),
    ({"text": {"format": {"type": "json_object", "name": "a"}}}, "text.format.name: requires type json_schema"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort: got one, but "),
    ({"text": {"verbosity": "low"}}, "text.verbosity: this field is not supported"),
    ({"top_logprobs": 1, "include": LOGPROBS}, "top_logprobs: got 1, expected at most 0; start the server"),
    ({"max_tokens": 3}, "max_tokens: got 3, expected null"),
    ({"background": True}, "background: this field is not supported"),
    ({"conversation": "a"}, "conversation: this field is not supported"),
    ({"prompt": {"id": "a"}}, "prompt: this field is not supported"),
    ({"truncation": "auto"}, "truncation: this field is not supported"),
]  # fmt: skip


def test_what_would_change_a_response_is_refused(address):
    for body, message in REFUSED:
        answer = httpx.post(f"{address}/v1/responses", json=ONE | {"input": "a"} | body, headers=AUTHORISED)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "a"}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    error = httpx.post(f"{address}/v1/chat/completions", json=body, headers=AUTHORISED).json()["error"]
    wanted = "messages.0.content.1.type: got 'image_url', expected 'text', as this server takes text only"
    assert (error["message"], error["param"]) == (wanted, "messages.0.content.1.type")


def test_fields_without_effect_and_items_of_earlier_responses_are_accepted():
    nulls = dict.fromkeys(openai.types.responses.response_create_params.ResponseCreateParamsBase.__annotations__)
    body = nulls | {"input": "a", "truncation": "disabled", "background": False, "service_tier": "auto"}
    assert parse_body(ResponsesBody, json.dumps(body).encode()).items()[0].content == "a"
    earlier = [
        {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "id": "2", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": None}]},
        {"type": "function_call", "id": "3", "call_id": "4", "name": "ab", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "5", "name": "ab", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "4", "output": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    chat = ResponsesBody(input=earlier, instructions="e").chat(ITEMS.validate_python(earlier))
    system, answer, result, *rest = (message.plain() for message in chat.messages)
    assert system == {"role": "system", "content": "e"}
    assert (answer["reasoning_content"], answer["content"]) == ("so", [{"type": "text", "text": "a"}])
    assert [call["id"] for call in answer["tool_calls"]] == ["4", "5"]
    assert (result["role"], result["tool_call_id"]) == ("tool", "4")
    assert [message["content"] for message in rest] == ["c", "d"]


def call(index: int, arguments: str, name: str = ""):
    head = {"id": f"call_{index}", "type": "function"} if name else {}
    return {"index": index, **head, "function": {"arguments": arguments} | ({"name": name} if name else {})}


@pytest.mark.parametrize("summary", [None, "auto"])
def test_events_of_reasoning_text_and_calls(summary):
    """They join to the output of the whole response, whose items are in the order of the answer."""
    parts = [("", [], "s"), ("", [], "o"), ("a", [], ""), ("b", [call(0, "", "ab")], ""), ("", [call(0, "{")], "")]
    parts += [("", [call(0, "}"), call(1, "{}", "a")], ""), ("", [], "")]
    deltas = [Delta(text, calls, [], [], [], reasoning) for text, calls, reasoning in parts]
    request = SimpleNamespace(ids=[1], wanted=SimpleNamespace(seed=None))
    handle = SimpleNamespace(done=False, result=None, request=request, cached=0, drafts=DraftCounts(0))
    body = parse_body(ResponsesBody, json.dumps({"input": "a", "reasoning": {"summary": summary}}).encode())
    kept = []

    def choice(found):
        own = {"finish_reason": "tool_calls", "logprobs": lambda *_: None, "delta": lambda _: found.pop(0)}
        own["reasoning_tokens"] = lambda: 2
        return SimpleNamespace(handle=handle, ended=False, **own)

    def form():
        return ResponsesFormat("m", body, 0.0, kept.append)

    streamed, one = form(), choice(list(deltas))
    events = streamed.opening([one])
    for number in range(len(deltas)):
        handle.done = number == len(deltas) - 1
        events += streamed.events(one)
    assert one.ended
    events = [strictly(EVENT, event) for event in [*events, *streamed.closing([one], None)]]
    names = [event.type.removeprefix("response.") for event in events]
    thoughts = "reasoning_summary_text" if summary else "reasoning_text"
    part = "reasoning_summary_part" if summary else "content_part"
    assert names == [
        "created", "in_progress", "output_item.added", f"{part}.added", f"{thoughts}.delta", f"{thoughts}.delta",
        f"{thoughts}.done", f"{part}.done", "output_item.done", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.item.status for event in events if event.type == "response.output_item.added"] == ["in_progress"] * 4
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    joined = Delta("ab", [call(0, "{}", "ab"), call(1, "{}", "a")], [], [], [], "so")
    counts = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = strictly(Response, form().whole([choice([joined])], counts))
    assert [item.to_dict() | {"id": ""} for item in whole.output] == [item.to_dict() | {"id": ""} for item in done]
    assert [item.type for item in done] == ["reasoning", "message", "function_call", "function_call"]
    (failed,) = form().failed("why", 503)
    assert strictly(EVENT, failed).response.error.message == "why"
    assert [response["status"] for response in kept] == ["completed"] * 2


def test_log_probabilities_are_those_of_the_text():
    """They follow it in pieces and in whole responses, without the tokens of reasoning, marks and calls."""
    texts = ["a", "b", "</s>", "é"[:1], " a", "c", "", "<c>", "a"]  # as bytes below
    data = [b"a", b"b", b"", b"\xc3", b"\xa9 a", b"c", b"", b"<c>", b"a"]
    tokens = [{"token": name, "bytes": list(own), "logprob": 0.0} for name, own in zip(texts, data, strict=True)]
    for pieces in (
        [("é ac", "ab", tokens)],
        [
            ("", "ab", tokens[:3]),
            ("", "", tokens[3:4]),
            ("é a", "", tokens[4:5]),
            ("", "", tokens[5:6]),
            ("c", "", tokens[6:]),
        ],
    ):
        form = ResponsesFormat("m", parse_body(ResponsesBody, b'{"input": "a"}'), 0.0, lambda _: None)
        for text, reasoning, scored in pieces:
            one = SimpleNamespace(logprobs=lambda *_, scored=scored: {"content": list(scored)}, finish_reason="stop")
            one.delta = lambda _, text=text, reasoning=reasoning: Delta(text, [], [], [], [], reasoning)
            form._read(one, False)
        assert form._output[-1]["content"][0]["logprobs"] == tokens[3:6]


def test_the_store_keeps_the_latest_responses():
    def response(name, text=""):
        return {"id": name, "output": [MessageItem(role="assistant", content=text).model_dump() | {"id": f"m{name}"}]}

    store = ResponseStore(2, 400)
    for name in "abc":
        store.put(response(name), [MessageItem(role="user", content=name)])
    with pytest.raises(HTTPException, match="previous_response_id: got 'a', expected the id of a response"):
        store.conversation("a", [])
    found = store.conversation("b", [ItemReference(id="mc"), MessageItem(role="user", content="d")])
    assert [item.content for item in found] == ["b", "", "", "d"]
    store.put(response("d", "a" * 200), [])
    with pytest.raises(HTTPException):
        store.get("b", "id")
    store.put(response("e", "a" * 500), [])  # more than all of the memory
    for name in "cde":
        with pytest.raises(HTTPException):
            store.get(name, "id")
    assert not store._owners
