"""Tokens of a server's answers as text and bytes, with a tokenizer that drops the space before a first word."""

import json

import httpx
import pytest

from helpers import scripted
from helpers.scripted import TEXT, THE, TREE
from helpers.serving import SECONDS, running
from hydrajax.certify.servers.answers import whole_answers
from hydrajax.loaded_model import make_executor
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes

NAMES = [" tre", *(f"bytes:\\x{byte:02x}" for byte in "🌳".encode()), " {", "</s>"]
READ = [" tre", *4 * "\ufffd", " {", "</s>"]  # by `hydrajax certify`


@pytest.fixture(scope="module")
def ask():
    model = scripted.model()
    sizes = PoolSizes(slots=1, chunk=16, cache_len=40, logprobs=3)
    with running(ExecutorPool(make_executor(model, model.program(tree="root")), sizes)) as (address, _):
        yield lambda path, **body: httpx.post(f"{address}/v1/{path}", json={"max_tokens": 9} | body, timeout=SECONDS)


def test_completions(ask):
    found = ask("completions", prompt="the", logprobs=3).json()
    logprobs = found["choices"][0]["logprobs"]
    assert logprobs["tokens"] == NAMES
    assert logprobs["text_offset"] == [0, 4, 4, 4, 4, 5, 7]
    assert list(logprobs["top_logprobs"][-1]) == ["</s>", "}", f"token_id:{scripted.SAME[1]}"]
    assert [token.text for token in whole_answers(found)[0].tokens] == READ


def test_chats(ask):
    body = {"messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 1}
    found = ask("chat/completions", **body).json()
    content = found["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == NAMES
    for tokens in (content, [token["top_logprobs"][0] for token in content]):
        assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == TEXT
    assert [token.text for token in whole_answers(found)[0].tokens] == READ


def test_marked_tokens_join_to_the_text(ask):
    lines = ask("completions", prompt="the", stream=True, stream_options={"include_drafts": True}).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    marked = [token["text"] for event in events for token in event.get("hydrajax", {}).get("tokens", ())]
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(marked) == TEXT


def test_echo(ask):
    for prompt, text in [("the", "the" + TEXT), ([THE, *TREE[:2]], "the🌳 {")]:
        assert ask("completions", prompt=prompt, echo=True).json()["choices"][0]["text"] == text
