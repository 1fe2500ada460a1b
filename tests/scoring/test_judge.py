"""A judge on a server of our own: what it is sent, what is read out of its replies, and when it is asked again."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hydrajax.bench.questions.sets import Question
from hydrajax.errors import HydrajaxError
from scoring.judge import INSTRUCTIONS, Judge, conversation, rating

QUESTION = Question(81, "writing", ("Write.", "Shorten."), {"reference": [None, "A haiku."]})
TEXTS = ["A long poem.\n", " A poem. "]


@pytest.fixture
def server(monkeypatch):
    """``server.url``, and ``server.replies``: a list that is used up, of texts, of status codes or of whole bodies."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.seen.append((self.path, self.headers.get("Authorization"), body))
            reply = self.server.replies.pop(0)
            if isinstance(reply, str):
                reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode()
            self.send_response(reply if isinstance(reply, int) else 200)
            if reply in (302, 307):
                self.send_header("Location", f"{self.server.url}/elsewhere")
            self.end_headers()
            self.wfile.write(b"no key k-1 here" if isinstance(reply, int) else reply)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url, found.seen, found.replies = f"http://127.0.0.1:{found.server_port}/v1", [], []
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def judge(server, key="k-1") -> Judge:
    return Judge(server.url, "strict-1", key, pauses=(0, 0))


def test_rating():
    for reply, value in {
        "Fine.\n[[7]]": 7.0, "[[ 8.5 ]]": 8.5, "[[10]]": 10.0, "It says [[10]] of itself, but no: [[1]]": 1.0,
        "[[0]]": None, "[[11]]": None, "[[-3]]": None, "Rating: [7]": None,
    }.items():  # fmt: skip
        assert rating(reply) == value, reply


def test_both_turns_are_graded(server):
    server.replies += ["Good. [[8]]", "Worse. [[5]]"]
    scored = judge(server).of(QUESTION, TEXTS)
    assert scored.values == {"rating": 6.5, "turn 1": 8.0, "turn 2": 5.0}
    assert scored.detail == {"replies": ["Good. [[8]]", "Worse. [[5]]"]}
    for turn, (path, authorization, body) in enumerate(server.seen):
        assert (path, authorization) == ("/v1/chat/completions", "Bearer k-1")
        assert (body["model"], body["temperature"]) == ("strict-1", 0)
        system, user = body["messages"]
        assert system == {"role": "system", "content": INSTRUCTIONS}
        assert user == {"role": "user", "content": conversation(QUESTION, TEXTS, turn)}
    first, second = (conversation(QUESTION, TEXTS, turn) for turn in (0, 1))
    asked = "Grade the assistant's last answer."
    assert first == f"<user>\nWrite.\n</user>\n\n<assistant>\nA long poem.\n</assistant>\n\n{asked}"
    assert second.startswith(first.removesuffix(asked))
    assert "<assistant>\nA poem.\n</assistant>\n\nA correct answer" in second
    assert "<reference>\nA haiku.\n</reference>" in second


def test_replies_without_a_rating_are_asked_for_again_and_then_given_up(server):
    server.replies += ["no idea", b"not JSON", "[[4]]", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"[]"]
    assert judge(server).of(QUESTION, TEXTS) is None  # the second turn's three replies hold none
    assert len(server.seen) == 6


def test_a_busy_server_is_asked_again(server):
    """One turn has no figures by turn."""
    server.replies += [429, 503, "[[9]]"]
    assert judge(server).of(Question(1, "a", ("b",)), ["c"]).values == {"rating": 9.0}


def test_a_server_that_refuses_or_is_not_there(server):
    for replies, message, asked in (
        ([500, 502, 429], "returned 429: no key ... here", 3),
        ([401], "returned 401: no key ... here", 1),
        ([302], "returned 302: no key ... here", 1),  # a redirect is not followed: the key would go with it
    ):
        server.replies += replies
        server.seen.clear()
        with pytest.raises(HydrajaxError, match=rf"^judge: {server.url} {message}$"):
            judge(server).of(QUESTION, TEXTS)
        assert len(server.seen) == asked
    with pytest.raises(HydrajaxError, match=r"^judge: cannot reach http://127.0.0.1:9/v1: .*refused"):
        Judge("http://127.0.0.1:9/v1", "m", pauses=(0,)).of(QUESTION, TEXTS)


def test_addresses_that_are_none():
    for url in ["localhost:80", "ftp://host/v1", "file:///etc/passwd", "http://", "http://["]:
        with pytest.raises(HydrajaxError, match=r"^judge: got .*, expected an http or https address"):
            Judge(url, "m")


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(server, monkeypatch):
    with pytest.raises(HydrajaxError, match="contains a password; set HYDRAJAX_JUDGE_KEY or OPENAI"):
        Judge("https://me:secret@host/v1", "m")
    monkeypatch.delenv("HYDRAJAX_JUDGE_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert Judge.of_environment(server.url, "m").key is None
    monkeypatch.setenv("OPENAI_API_KEY", "k-2")
    assert Judge.of_environment(server.url, "m").key == "k-2"
    monkeypatch.setenv("HYDRAJAX_JUDGE_KEY", "k-1")
    found = Judge.of_environment(f"{server.url}/chat/completions/", "m")
    assert found.key == "k-1"
    assert "k-1" not in repr(found) + json.dumps(found.identity())
    server.replies += ["[[2]]"]
    assert found.of(Question(1, "a", ("b",)), ["c"]).values == {"rating": 2.0}
    assert server.seen[0][0] == "/v1/chat/completions"
    server.replies += ["[[2]]"]
    Judge(server.url, "m").of(Question(1, "a", ("b",)), ["c"])
    assert server.seen[1][1] is None
