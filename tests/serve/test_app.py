"""The API over a socket, with OpenAI's client and with benchmark clients; the chat page and the API that it uses."""

import asyncio
import json
import re
from importlib.metadata import version

import httpx
import jsonschema
import numpy as np
import openai
import pytest

from helpers.serving import AUTHORISED, GOOD, HELLO, KEY, SECONDS, expected, running
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.errors import HydrajaxError
from hydrajax.serve.connections import listen
from hydrajax.serve.request_encoder import RequestEncoder

PROMPTS = ["abc", "a bad cafe", "deaf", "no one can go"]


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, timeout=SECONDS)


def test_completions_are_those_of_generate(served, client):
    wanted = expected(served, PROMPTS, limit=30)
    answer = client.completions.create(model="letters", prompt=PROMPTS, max_tokens=30, logprobs=0)
    assert [choice.text for choice in answer.choices] == [result.text for result in wanted]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, result in zip(answer.choices, wanted, strict=True):
        assert choice.finish_reason == {"eos": "stop", "length": "length"}[result.finish_reason]
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == result.new_tokens
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
        assert "".join(choice.logprobs.tokens).removesuffix("</s>") == choice.text
    tokens, steps = (sum(getattr(result, name) for result in wanted) for name in ("new_tokens", "steps"))
    usage = answer.usage
    assert (usage.completion_tokens, usage.prompt_tokens) == (tokens, sum(map(len, PROMPTS)))
    assert usage.total_tokens == usage.prompt_tokens + tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens == tokens - steps > 0
    ids = [served.tokenizer.encode(prompt) for prompt in PROMPTS]
    again = client.completions.create(model="letters", prompt=ids, max_tokens=30)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]


def test_streamed_choices_join_to_the_answers_of_their_seed(served, client):
    messages = [{"role": "system", "content": "be a"}, {"role": "user", "content": "bad cafe"}]
    rule = ExactSampling(1.1, top_p=0.95)
    ids = served.tokenizer.encode("be a bad cafe ")
    wanted = expected(served, [ids] * 3, rule, limit=25, seeds=5)
    settings = {"model": "letters", "messages": messages, "max_completion_tokens": 25, "n": 3, "seed": 5}
    settings |= {"temperature": 1.1, "top_p": 0.95, "logprobs": True}
    whole = client.chat.completions.create(**settings)
    assert [choice.message.content for choice in whole.choices] == [result.text for result in wanted]
    texts, reasons, logprobs, usage = [""] * 3, [None] * 3, [0.0] * 3, None
    for event in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            for token in choice.logprobs.content if choice.logprobs else ():
                logprobs[choice.index] += token.logprob
    assert texts == [result.text for result in wanted]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for found, choice in zip(logprobs, whole.choices, strict=True):
        assert found == pytest.approx(sum(token.logprob for token in choice.logprobs.content), abs=1e-3)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), sum(result.new_tokens for result in wanted))


def test_an_answer_ends_before_a_stop_string(served, client):
    (full,) = expected(served, ["abc"], limit=30)
    stop = [full.text[7:9], "not generated"]
    answer = client.completions.create(model="letters", prompt="abc", max_tokens=30, stop=stop)
    assert answer.choices[0].text == full.text[: full.text.index(stop[0])]
    assert answer.choices[0].finish_reason == "stop"
    pieces = client.completions.create(model="letters", prompt="abc", max_tokens=30, stop=stop[0], stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == answer.choices[0].text


def test_concurrent_clients_get_the_answers_of_generate(served, address):
    async def ask(number: int) -> str:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, timeout=SECONDS) as own:
            prompt, settings = PROMPTS[number % 4], {"model": "letters", "max_tokens": 20}
            if number % 3:
                return (await own.completions.create(prompt=prompt, **settings)).choices[0].text
            events = await own.completions.create(prompt=prompt, stream=True, **settings)
            return "".join([event.choices[0].text async for event in events if event.choices])

    async def everybody():
        return await asyncio.gather(*(ask(number) for number in range(24)))

    wanted = [result.text for result in expected(served, PROMPTS, limit=20)]
    assert asyncio.run(everybody()) == wanted * 6


def test_models_health_and_metrics(address, client):
    assert [model.id for model in client.models.list()] == ["letters"]
    listed = client.models.retrieve("letters")
    assert (listed.owned_by, listed.root, listed.parent, listed.max_model_len) == ("hydrajax", "letters", None, 96)
    assert client.models.retrieve("hydrajax") == listed
    with pytest.raises(openai.NotFoundError, match="model: got 'other', expected one of: letters"):
        client.models.retrieve("other")
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    client.completions.create(model="letters", prompt="abc", max_tokens=9)
    lines = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{address}/metrics").text.splitlines() if line[:1] not in "#"
    )
    values = {name: float(value) for name, value in lines.items()}
    assert values["hydrajax_tokens_total"] >= 9
    assert values["hydrajax_tokens_per_step"] == values["hydrajax_tokens_total"] / values["hydrajax_steps_total"] > 1
    assert values["hydrajax_time_to_first_token_seconds_count"] == values["hydrajax_ended_total"] > 0
    assert 0 < values['hydrajax_cache_bytes{use="kept"}'] < values['hydrajax_cache_bytes{use="limit"}']
    assert values["hydrajax_waiting"] == values["hydrajax_running"] == 0


def test_benchmark_clients_find_the_first_token_and_the_usage(served, address):
    """They split the stream at line ends, and take the first event with text, without a role, as the first token.

    The finish reason, the usage and the terminator come as one piece: each piece wakes the client.
    """
    (plain,) = expected(served, ["abc"], limit=12)
    common = {"model": "letters", "stream": True, "temperature": 0.0, "ignore_eos": True, "prompt": "abc"}
    usage = {"stream_options": {"include_usage": True}}
    of_vllm = common | usage | {"repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None}
    of_sglang = common | {"max_tokens": 3, "best_of": 1}
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    chat = {"model": "letters", "messages": parts, "max_completion_tokens": 12, "stream": True} | usage
    for path, body in (("completions", of_vllm), ("completions", of_sglang), ("chat/completions", chat)):
        headers = AUTHORISED | {"x-request-id": "bench-0"}
        url = f"{address}/v1/{path}"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=SECONDS) as answer:
            assert answer.status_code == 200
            *pieces, last = answer.iter_raw()  # httpx yields the chunks of the transfer one by one
        lines = [line.removeprefix("data: ") for line in b"".join([*pieces, last]).decode().splitlines() if line]
        assert lines.pop() == "[DONE]"
        events = list(map(json.loads, lines))
        if "stream_options" in body:
            assert not any(b'"usage"' in piece for piece in pieces)
            assert b'"finish_reason": "' in last.split(b'"usage"')[0]
            tokens = events.pop()["usage"]["completion_tokens"]
            assert tokens == 12 if path == "completions" else tokens > 0
        if path == "completions":
            assert events[0]["choices"][0]["text"]
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text.startswith(plain.text[: body["max_tokens"]])
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        else:
            first, second, *_ = [event["choices"][0]["delta"] for event in events]
            assert first == {"role": "assistant", "content": ""}
            assert second["content"]


def test_a_bias_and_a_penalty_need_no_further_flags(client):
    ban = {str(token): -100 for token in range(3, 17)}
    answer = client.completions.create(model="letters", prompt="no", max_tokens=9, logit_bias=ban, presence_penalty=9)
    assert set(answer.choices[0].text) <= set("abc")


def test_vllms_fields_of_ends_and_of_forbidden_tokens(served, address):
    def ask(path="completions", **body):
        body = {"max_tokens": 30} | ({"prompt": "abc"} if path == "completions" else HELLO) | body
        return httpx.post(f"{address}/v1/{path}", json=body, headers=AUTHORISED, timeout=SECONDS)

    def first(*given, **body):
        choice = ask(*given, **body).json()["choices"][0]
        return choice.get("text"), choice["finish_reason"], choice["stop_reason"]

    (full,) = expected(served, ["abc"], limit=30)
    token = full.output_ids[7]
    at, stop = full.output_ids.index(token), full.text[9:11]
    end = full.text.index(stop)
    assert first(stop_token_ids=[token]) == (full.text[:at], "stop", token)
    assert first(stop_token_ids=[token], include_stop_str_in_output=True) == (full.text[: at + 1], "stop", token)
    assert first(stop=stop) == (full.text[:end], "stop", stop)
    assert first(stop=stop, include_stop_str_in_output=True) == (full.text[: end + 2], "stop", stop)
    assert first(max_tokens=2) == (full.text[:2], "length", None)
    assert first("chat/completions", logit_bias={"16": 100}, stop_token_ids=[16])[1:] == ("stop", None)  # EOS
    lines = ask(stop_token_ids=[token], stream=True).text.split("\n")
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(choice["text"] for choice in choices) == full.text[:at]
    assert [choice["stop_reason"] for choice in choices] == [None] * (len(choices) - 1) + [token]
    assert set(first(allowed_token_ids=[0, 3], logit_bias={"3": 1})[0]) <= set("ad")
    assert not {full.text[3], full.text[7]} & set(first(bad_words=[full.text[3], full.text[7]])[0])
    for body, message in [
        ({"allowed_token_ids": []}, "allowed_token_ids: got [], expected token ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids.0: got '1', expected an integer"),
        ({"stop_token_ids": [17]}, "stop_token_ids: got 17, expected token ids from 0 to 16"),
        ({"bad_words": [""]}, "bad_words.0: got '', expected at least 1 character"),
        ({"min_tokens": 2, "stop_token_ids": [1]}, "min_tokens: got 2 with stop_token_ids, expected one of them"),
    ]:
        error = ask(**body).json()["error"]
        assert error["message"].startswith(message), error


def test_echo_puts_the_prompt_before_each_answer(served, client):
    answer = client.completions.create(model="letters", prompt=["abc", "deaf"], max_tokens=5, n=2, echo=True)
    first, second = expected(served, ["abc", "deaf"], limit=5)
    texts = ["abc" + first.text, "deaf" + second.text]
    assert [choice.text for choice in answer.choices] == [texts[0], texts[0], texts[1], texts[1]]
    pieces = client.completions.create(model="letters", prompt=[[0, 1, 2]], max_tokens=5, echo=True, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == texts[0]


def test_tokens_of_a_text_begin_with_special_ones_unless_refused(address, monkeypatch):
    monkeypatch.setattr(RequestEncoder, "prompt", lambda self, text, special: np.array([int(special)]))
    for given, begins in (({}, [1]), ({"add_special_tokens": None}, [1]), ({"add_special_tokens": False}, [0])):
        body = {"prompt": "abc"} | given
        assert httpx.post(f"{address}/tokenize", json=body, headers=AUTHORISED).json()["tokens"] == begins


def test_the_other_routes_of_vllm(address):
    def ask(route, body, headers=None):
        return httpx.post(f"{address}/{route}", json=body, headers=AUTHORISED if headers is None else headers)

    assert httpx.get(f"{address}/version").json() == {"version": version("hydrajax")}
    found = {"count": 3, "max_model_len": 96, "tokens": [0, 1, 2], "token_strs": None}
    assert ask("tokenize", {"model": "letters", "prompt": "abc"}).json() == found
    assert ask("tokenize", {"prompt": "abc", "return_token_strs": True}).json()["token_strs"] == ["a", "b", "c"]
    assert ask("tokenize", HELLO).json()["tokens"] == [0, 15]
    as_vllm_bench = {"model": "letters", "prompt": "abc", "add_special_tokens": False}
    assert ask("tokenize", as_vllm_bench).json() == found
    assert ask("detokenize", {"tokens": [0, 1, 2, 16]}).json() == {"prompt": "abc</s>"}
    for route, body, status, message in (
        ("tokenize", {}, 400, "prompt: got neither prompt nor messages, expected one of them"),
        ("tokenize", {"prompt": "a", "model": "x"}, 404, "model: got 'x', expected one of: letters"),
        (
            *("tokenize", HELLO | {"add_special_tokens": True}, 400),
            "add_special_tokens: got true, expected false: the chat template writes special tokens",
        ),
        ("detokenize", {"tokens": [17]}, 400, "tokens: got token id 17, expected 0 to 16"),
        ("detokenize", {"tokens": 3}, 400, "tokens: got 3, expected a list"),
    ):
        answer = ask(route, body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)
    for route, body in (("tokenize", {"prompt": "abc"}), ("detokenize", {"tokens": [1]})):
        assert ask(route, body, {}).status_code == 401


def test_any_model_and_pages_of_other_origins(small):
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with running(small, any_model=True, cors=["https://good.example"]) as (address, _):
        for origin, allowed in (("https://good.example", "https://good.example"), ("https://evil.example", None)):
            asked = httpx.options(f"{address}/v1/completions", headers=preflight | {"origin": origin})
            answer = httpx.post(f"{address}/v1/completions", json=GOOD | {"model": "gpt"}, headers={"origin": origin})
            assert [one.headers.get("access-control-allow-origin") for one in (asked, answer)] == [allowed] * 2
            assert answer.json()["model"] == "hydrajax"


def test_an_ipv6_address_is_answered(small):
    try:
        listen("::1", 0).close()
    except HydrajaxError:
        pytest.skip("this machine has no IPv6")
    with running(small, host="::1") as (address, _):
        assert address.startswith("http://[::1]:")
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.get(f"{address}/health", headers={"host": "evil.example"}).status_code == 400


def test_every_route_is_described_and_its_example_is_answered(address):
    found = httpx.get(f"{address}/openapi.json").json()
    described = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    listed = httpx.get(f"{address}/nowhere").json()["error"]["message"].split(": ")[2].replace(":path", "").split(", ")
    pages = {("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json")}
    assert described | pages == {tuple(route.split(" ")) for route in listed}
    name = {"/v1/models/{name}": "letters"}
    for method, path in sorted(described, key=lambda route: (route[0] != "POST", route[0] == "DELETE")):
        operation = found["paths"][path][method.lower()]
        content = operation.get("requestBody", {"content": {"application/json": {}}})["content"]["application/json"]
        if content:  # the tests' model has few letters
            validator(found, content["schema"]).validate(content["example"])
        body = {
            field: "abc" if isinstance(value, str) else value for field, value in content.get("example", {}).items()
        }
        body |= {"messages": [{"role": "user", "content": "a"}]} if "messages" in body else {}
        url = f"{address}{path.replace('{name}', name.setdefault(path, name.get('response', '')))}"
        answer = httpx.request(method, url, json=body or None, headers=AUTHORISED, timeout=SECONDS)
        described_as = operation["responses"]["200"]["content"]
        assert answer.status_code == 200, answer.text
        if "application/json" in described_as:
            validator(found, described_as["application/json"]["schema"]).validate(answer.json())
        if path == "/v1/responses":
            name["response"] = answer.json()["id"]
        refused = httpx.request(method, url, json=body or None, timeout=SECONDS)
        assert (refused.status_code == 401) == ("security" in operation)
        if refused.status_code == 401:
            content = operation["responses"]["401"]["content"]["application/json"]
            validator(found, content["schema"]).validate(refused.json())


def validator(document, schema):
    return jsonschema.Draft202012Validator(schema | {"components": document["components"]})


def test_the_pages_load_nothing_from_other_hosts(address):
    for path, script, others in (("", "page.js", []), ("docs", "docs.js", ["openapi.json"])):
        page = httpx.get(f"{address}/{path}")
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        linked = re.findall(r'(?:src|href)="([^"]*)"', page.text)
        assert sorted(linked) == sorted(["data:,", "page.css", script, *others])
        for name, kind in (("page.css", "text/css"), (script, "javascript")):
            assert kind in httpx.get(f"{address}/{name}").headers["content-type"]
        assert not re.search(r"https?://|innerHTML", page.text + httpx.get(f"{address}/{script}").text)
    assert httpx.get(f"{address}/app.py").status_code == 404
    assert httpx.get(f"{address}/../app.py").status_code == 404


def test_every_event_marks_drafted_tokens(address, served):
    """All tokens of a step except the first one are drafted; the tokens join to the text."""
    (wanted,) = expected(served, ["a bad cafe"], limit=30)
    options = {"include_drafts": True, "include_usage": True}
    body = {"prompt": "a bad cafe", "max_tokens": 30, "stream": True, "stream_options": options}
    answer = httpx.post(f"{address}/v1/completions", json=body, headers=AUTHORISED, timeout=SECONDS)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    found = [token for event in events for token in event.get("hydrajax", {}).get("tokens", [])]
    roots = {sum(wanted.emitted_per_step[:step]) for step in range(wanted.steps)}
    assert [token["drafted"] for token in found] == [number not in roots for number in range(wanted.new_tokens)]
    assert "".join(token["text"] for token in found).removesuffix("</s>") == wanted.text
    assert 0 < sum(token["drafted"] for token in found) == wanted.new_tokens - wanted.steps


def test_several_models_are_chosen_by_name(small):
    """Metrics add up the models' counts; an unknown name is refused."""
    with running(small, others={"second": small}) as (address, _):
        for name, status in (("hydrajax", 200), ("second", 200), ("", 200), ("third", 404)):
            body = {"model": name, "prompt": "abc", "max_tokens": 2}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS)
            assert answer.status_code == status
            if status == 200:
                assert answer.json()["model"] == (name or "hydrajax")
            else:
                assert answer.json()["error"]["message"] == "model: got 'third', expected one of: hydrajax, second"
        assert "hydrajax_ended_total 3.0" in httpx.get(f"{address}/metrics").text
