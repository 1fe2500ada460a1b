"""Log-probabilities of prompts against NumPy: ``echo`` with ``logprobs``, as lm-evaluation-harness asks for them."""

import json

import httpx
import numpy as np
import pytest

from helpers.log_probabilities import of_whole_text
from helpers.serving import AUTHORISED, HELLO, SECONDS, running
from hydrajax.serve.prompt_scores import PromptScorer

CLOSE = {"abs": 1e-4}


@pytest.fixture(scope="module")
def ask(address):
    def asked(path="completions", **body) -> httpx.Response:
        return httpx.post(f"{address}/v1/{path}", json=body, headers=AUTHORISED, timeout=SECONDS)

    return asked


@pytest.fixture(scope="module")
def log_p(served):
    """``log_p(ids)``: log-probabilities ``[T-1, V]`` of the tokens after the first."""
    return lambda ids: of_whole_text(served.model, served.params.base, ids[:1], ids[1:])


def test_the_requests_of_lm_eval(served, ask, log_p):
    """Batches of token ids; a choice's score is the sum of its tokens', without the one that is generated."""
    random = np.random.default_rng(0)
    questions = [random.integers(0, 16, size).tolist() for size in (3, 9, 30)]
    choices = [random.integers(0, 16, size).tolist() for size in (1, 4)]
    likeliest = [int(log_p([*question, 0])[-1].argmax()) for question in questions]
    texts = [(question, [*choice]) for question in questions for choice in choices]
    texts += [(question, [best]) for question, best in zip(questions, likeliest, strict=True)]
    body = {"prompt": [[*question, *choice] for question, choice in texts], "model": "letters", "temperature": 0}
    found = ask(**body, max_tokens=1, logprobs=1, seed=1234, echo=True).json()["choices"]
    plain = ask(**body, max_tokens=1, logprobs=0).json()["choices"]
    assert len(found) == len(texts)
    for (question, choice), scored, alone in zip(texts, found, plain, strict=True):
        logprobs, size, wanted = scored["logprobs"], len(question), log_p([*question, *choice])
        parts = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
        assert {len(part) for part in parts} == {size + len(choice) + 1}
        values, tops = logprobs["token_logprobs"][size:-1], logprobs["top_logprobs"][size:-1]
        rows = wanted[size - 1 :]
        assert values == pytest.approx(rows[np.arange(len(choice)), choice].tolist(), **CLOSE)
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert is_greedy == (rows.argmax(axis=1).tolist() == choice)
        assert [max(top.values()) for top in tops] == pytest.approx(rows.max(axis=1).tolist(), **CLOSE)
        # The last token is the one that is generated without an echo.
        assert [logprobs["tokens"][-1]] == alone["logprobs"]["tokens"]
        assert logprobs["token_logprobs"][-1:] == pytest.approx(alone["logprobs"]["token_logprobs"], **CLOSE)
    assert [choice["logprobs"]["token_logprobs"][0] for choice in found] == [None] * len(texts)


def test_an_answer_that_is_scored_as_a_prompt_has_the_log_probabilities_of_its_generation(served, ask):
    answer = ask(prompt="a bad", max_tokens=20, logprobs=0, temperature=0.9, seed=3).json()["choices"][0]
    ids = served.tokenizer.encode("a bad" + answer["text"])
    again = ask(prompt=[ids], max_tokens=0, logprobs=0, echo=True).json()
    assert (again["choices"][0]["text"], again["choices"][0]["finish_reason"]) == ("a bad" + answer["text"], "length")
    assert (again["usage"]["completion_tokens"], again["usage"]["prompt_tokens"]) == (0, len(ids))
    logprobs, wanted = again["choices"][0]["logprobs"], answer["logprobs"]["token_logprobs"]
    assert logprobs["top_logprobs"] is None
    assert logprobs["token_logprobs"][5:] == pytest.approx(wanted[: len(ids) - 5], **CLOSE)


def test_prompt_logprobs(served, ask, log_p):
    """Per choice in completions, of a chat at the top; neither temperature nor a bias changes them."""
    ids = served.tokenizer.encode("a bad cafe")
    given = {"max_tokens": 2, "temperature": 1.5, "logit_bias": {"3": 50}, "seed": 1}
    body = ask(prompt=["a bad cafe", "no"], prompt_logprobs=3, n=2, **given).json()
    first, second, third, _ = (choice["prompt_logprobs"] for choice in body["choices"])
    assert first == second
    assert third[0] is first[0] is None
    assert len(first) == len(ids)
    for place, token, row in zip(first[1:], ids[1:], log_p(ids), strict=True):
        order = np.argsort(-row, kind="stable")
        wanted = {**{int(other): at for at, other in enumerate(order[:3], 1)}}
        wanted[token] = 1 + int((row > row[token]).sum())
        assert {int(name): one["rank"] for name, one in place.items()} == wanted
        for name, one in place.items():
            assert one["logprob"] == pytest.approx(row[int(name)], **CLOSE)
            assert one["decoded_token"] == (served.tokenizer.decode([int(name)]) or "</s>")
    messages = [{"role": "user", "content": "a bad cafe"}]
    chat = ask("chat/completions", messages=messages, prompt_logprobs=0, **given).json()
    assert "prompt_logprobs" not in chat["choices"][0]
    values = [[one["logprob"] for one in place.values()] for place in chat["prompt_logprobs"][1 : len(ids)]]
    wanted = log_p(ids)[np.arange(len(ids) - 1), ids[1:]]
    assert [value for (value,) in values] == pytest.approx(wanted.tolist(), **CLOSE)


def test_a_stream_begins_with_the_prompts(served, ask):
    ids = [0, served.eos_ids[0], 1, 2]  # the text has the name of the special token
    whole = ask(prompt=[ids], max_tokens=6, logprobs=0, echo=True).json()["choices"][0]
    assert whole["text"].startswith("a</s>bc")
    assert whole["logprobs"]["text_offset"][:5] == [0, 1, 5, 6, 7]
    lines = ask(prompt=[ids], max_tokens=6, logprobs=0, echo=True, stream=True).text.split("\n")
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        pieces = [part["logprobs"][name] or () for part in parts if part["logprobs"]]
        found = [value for piece in pieces for value in piece]
        assert found == (values or []) if name != "token_logprobs" else found[1:] == pytest.approx(values[1:], **CLOSE)
    lines = ask(prompt="abc", max_tokens=0, echo=True, stream=True).text.split("\n")
    assert '"text": "abc"' in lines[0]


def test_a_score_that_takes_too_long(small, monkeypatch):
    async def slow(self, ids, k):
        raise AssertionError

    monkeypatch.setattr(PromptScorer, "score", slow)
    with running(small, timeout=0.001) as (address, _):
        body = {"prompt": "abc", "max_tokens": 90, "echo": True, "logprobs": 0, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the prompt was not scored in time")


def test_refusals(ask):
    for path, body, message in [
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens: got 0, expected at least 1 without echo"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens: got -1, expected at least 0"),
        ("completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs: got 21, expected at most 20"),
        ("completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs: got -1, expected at least 0"),
        ("completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs: got 1 with stream"),
        ("completions", {"prompt": "a", "logprobs": 1, "echo": True, "stream": True}, "logprobs: got 1, expected at"),
        ("chat/completions", HELLO | {"max_tokens": 0}, "max_tokens: got 0, expected at least 1"),
    ]:
        answer = ask(path, **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)
