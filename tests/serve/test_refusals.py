"""Requests that the API refuses, and clients that stay silent, hang up or ask for too much."""

import json
import re
import socket
import threading
import time

import httpx

from helpers.serving import AUTHORISED, GOOD, HELLO, KEY, SECONDS, running

BAD_COMPLETIONS = [
    (b"{", "the body is not JSON"),
    (b"[1]", "the body: got [1], expected an object"),
    ({"prompt": ""}, "prompt: got '', expected a text, a list of token ids, or a list of up to 128"),
    ({"prompt": [True]}, "prompt: got "),
    ({"prompt": ["a", [1]]}, "prompt: got "),
    ({"prompt": [99]}, "prompt: got token id 99, expected 0 to"),
    ({"prompt": [10**30]}, "prompt: .*token id 1000000000000"),
    ({"prompt": "a" * 96}, "prompt: got 96 tokens, expected fewer than"),
    ({"prompt": "a" * 385}, "prompt: got 385 bytes, expected at most 384; shorten the text"),
    ({"prompt": ["a"] * 3, "n": 50}, "n: got 3 prompts x 50 choices, expected at most 128"),
    ({"stop": ["a"] * 17}, "stop: got .*, expected a text or a list of up to 16 texts"),
    ({"stop": [""]}, "stop.*: got .*, expected a text or a list of up to 16 texts"),
    ({"max_tokens": 0}, "max_tokens: got 0, expected at least 1"),
    ({"temperature": -1}, "temperature: got -1.0, expected a finite number from 0 up"),
    ({"temperature": "nan"}, "temperature: got 'nan', expected a finite number"),
    ({"top_p": 0}, "top_p: got 0.0, expected above 0 and at most 1"),
    ({"seed": -1}, "seed: got -1, expected at least 0"),
    ({"n": 1000}, "n: got 1000, expected at most 128"),
    ({"logprobs": 3}, "logprobs: got 3, expected at most 0; start the server"),
    ({"logprobs": 6}, "logprobs: got 6, expected at most 5"),
    ({"min_tokens": 4}, "min_tokens: got 4, expected at most the limit of new tokens, 3"),
    ({"logit_bias": {"3": 101}}, "logit_bias: got 101, expected at most 100"),
    ({"logit_bias": {"17": 1}}, "logit_bias: got token id 17, expected 0 to"),
    ({"logit_bias": {"x": 1}}, 'logit_bias: got {"x": 1.0}, expected token ids'),
    ({"beam": 3}, "beam: this field is not supported"),
]
BAD_CHATS = [
    ({"messages": []}, "messages: got [], expected at least 1 item"),
    ({"messages": [{"role": "x", "content": "a"}]}, "messages.0.role: got 'x', expected 'system', "),
    ({"messages": [{"role": "user", "content": "é" * 200}]}, "messages: got 400 bytes, "),
    ({"messages": [{"role": "user", "content": "a</s>"}]}, "messages.0: contains the special token </s>"),
    ({"top_logprobs": 1}, "top_logprobs: requires logprobs=true"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs: got 2, expected at most 0; start the server"),
]


def test_bad_requests_get_a_status_and_one_line(address):
    cases = [
        ("completions", {"prompt": "a" * 5000}, 413, "the body has more than 5000 bytes"),
        ("completions", GOOD | {"model": "gpt"}, 404, "model: got 'gpt', expected one of: letters"),
        ("nowhere", {}, 404, "no such route: POST /v1/nowhere; this server has: GET /v1/models, "),
        *(("completions", body, 400, message) for body, message in BAD_COMPLETIONS),
        *(("chat/completions", HELLO | body, 400, message) for body, message in BAD_CHATS),
    ]
    for path, body, status, message in cases:
        if path == "completions" and isinstance(body, dict):
            body = GOOD | body
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = AUTHORISED | {"content-type": "application/json"}
        answer = httpx.post(f"{address}/v1/{path}", content=content, headers=headers)
        error = answer.json()["error"]
        assert answer.status_code == status, error
        assert re.match(message if ".*" in message else re.escape(message), error["message"])
        assert "\n" not in error["message"]
        assert error["param"] == (re.match(r"[a-z][\w.]*(?=: )", error["message"]) or [None])[0]
        assert "should" not in error["message"]


def test_an_exception_of_any_route_has_openais_form(small, monkeypatch, caplog):
    """The log has the traceback, the client nothing of it."""

    def fail(*_):
        raise RuntimeError("secret")

    def error_of(answer: httpx.Response, status: int, text: str) -> None:
        assert answer.status_code == status
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "secret" not in error["message"]

    with running(small) as (address, _):
        for method, path, status in (("POST", "health", 405), ("GET", "v1/completions", 405), ("GET", "x", 404)):
            answer = httpx.request(method, f"{address}/{path}")
            error_of(answer, status, answer.text)
        answer = httpx.put(f"{address}/v1/responses/a")
        error_of(answer, 405, answer.text)
        for path in ("a%0A%0Db", "v1/models/%0A", "v1/responses/%0A"):
            found = httpx.get(f"{address}/{path}")
            error_of(found, 404, found.text)
            assert "\n" not in found.json()["error"]["message"]
        assert set(answer.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD"}
        monkeypatch.setattr("hydrajax.serve.replies.ReplyFormat.events", fail)
        answer = httpx.post(f"{address}/v1/completions", json=GOOD | {"stream": True}, timeout=SECONDS)
        error_of(answer, 200, answer.text.split("data: ")[-1])
        assert caplog.text.count("RuntimeError: secret") == 1
        caplog.clear()
        monkeypatch.setattr("hydrajax.serve.request_encoder.RequestEncoder.prompt", fail)
        monkeypatch.setattr("hydrajax.serve.prometheus.ServerMetrics.text", fail)
        for method, path in (("POST", "v1/completions"), ("POST", "tokenize"), ("GET", "metrics")):
            answer = httpx.request(method, f"{address}/{path}", json=GOOD if "v1" in path else {"prompt": "a"})
            error_of(answer, 500, answer.text)
            assert answer.json()["error"]["type"] == "server_error"
    assert caplog.text.count("RuntimeError: secret") == 3


def test_keys_content_types_and_host_names(address):
    json_type = {"content-type": "application/json"}
    content = json.dumps(GOOD)
    for headers, status in (
        (json_type, 401),
        (json_type | {"authorization": "Bearer a guess"}, 401),
        ({"authorization": f"Bearer {KEY}", "content-type": "text/plain"}, 415),
        (json_type | {"authorization": f"Bearer {KEY}", "host": "evil.example"}, 400),
        (json_type | {"authorization": f"Bearer {KEY}"}, 200),
        (json_type | {"authorization": f"bearer {KEY}"}, 200),
        (json_type | {"authorization": f"BEARER  {KEY}"}, 200),
        (json_type | {"authorization": KEY}, 401),
        (json_type | {"authorization": f"Basic {KEY}"}, 401),
        (json_type | {"authorization": f"Bearer {KEY}\xff".encode("latin-1")}, 401),
    ):
        assert httpx.post(f"{address}/v1/completions", content=content, headers=headers).status_code == status
    assert httpx.get(f"{address}/v1/completions", headers=AUTHORISED).status_code == 405
    assert httpx.get(f"{address}/v1/models").status_code == 401


def raw(address: str, content_length: int, body: bytes = b"") -> socket.socket:
    """A connection with a hand-written start of a request."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(60)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {content_length}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_body_that_does_not_arrive_times_out(address):
    with raw(address, 100, b'{"prompt"') as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def until(found, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_client_that_disconnects_frees_its_slots(small):
    """During a stream, while it waits for a whole answer, and while it waits in the queue."""
    with running(small) as (address, batcher):
        body = json.dumps({"prompt": "abc", "max_tokens": 90, "n": 6, "stream": True, "temperature": 2.0}).encode()
        waits = json.dumps({"prompt": "abc", "max_tokens": 90, "n": 3, "temperature": 2.0}).encode()
        first, second = raw(address, len(body), body), raw(address, len(waits), waits)
        assert first.recv(4000).startswith(b"HTTP/1.1 200")
        until(lambda: batcher.stats().requests == 9)
        second.close()
        first.close()
        until(lambda: batcher.stats().running == 0 and batcher.stats().waiting == 0)
        stats = batcher.stats()
        assert stats.cancelled > 0
        assert stats.cancelled + stats.ended == 9
        assert httpx.post(f"{address}/v1/completions", json=GOOD, timeout=SECONDS).status_code == 200


def test_a_full_queue_and_a_closed_server(small):
    with running(small, queue=1) as (address, batcher):
        many = {"prompt": "abc", "n": 4, "max_tokens": 5}
        answer = httpx.post(f"{address}/v1/completions", json=many)
        assert answer.status_code == 400  # it never fits
        assert answer.json()["error"]["message"].startswith("n: got 4 sequences (prompts x n), expected at most 3, ")
        body = json.dumps(many | {"n": 3, "max_tokens": 90, "stream": True, "logit_bias": {"16": -100}}).encode()
        with raw(address, len(body), body) as first:
            assert first.recv(4000).startswith(b"HTTP/1.1 200")
            answer = httpx.post(f"{address}/v1/completions", json=many | {"n": 3})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        batcher.close()
        answer = httpx.post(f"{address}/v1/completions", json=GOOD)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")


def test_an_answer_that_takes_too_long_is_cut_off(small, monkeypatch):
    kind = type(small.executor)
    advance = kind.advance
    monkeypatch.setattr(kind, "advance", lambda *args, **more: (time.sleep(0.1), advance(*args, **more))[1])
    with running(small, timeout=0.5) as (address, batcher):
        answer = httpx.post(f"{address}/v1/completions", json=GOOD | {"max_tokens": 90}, timeout=SECONDS).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] < 90
        assert batcher.stats().cancelled == 1


def test_short_prompts_do_not_wait_for_long_ones(small, monkeypatch):
    """While as many long prompts as there are threads for them are encoded."""
    from hydrajax.serve import app, request_encoder

    encode, long_text, go = request_encoder.Prompt.ids, "a" * 90, threading.Event()

    def slow(prompt, *arguments):
        if prompt.content == long_text:
            started.append(1)
            assert go.wait(60)
        return encode(prompt, *arguments)

    started: list[int] = []
    monkeypatch.setattr(request_encoder.Prompt, "ids", slow)
    monkeypatch.setattr(app, "SHORT_CONTENT", 40)
    monkeypatch.setattr(app, "LONG_CONTENT", 80)
    long = json.dumps(GOOD | {"prompt": long_text}).encode()
    with running(small) as (address, _):
        waiting = [raw(address, len(long), long) for _ in range(5)]
        until(lambda: len(started) == app.LONG_CONTENTS)
        assert httpx.post(f"{address}/v1/completions", json=GOOD, timeout=SECONDS).status_code == 200
        assert len(started) == app.LONG_CONTENTS  # the others wait, which bounds the memory
        go.set()
        for connection in waiting:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
