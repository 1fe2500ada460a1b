"""The chat page and the API that it uses: models to choose from, and marks of drafted tokens."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from helpers.serving import SECONDS, expected, running
from hydrajax.loaded_model import make_executor
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.served_models import plain_step_seconds, total


@pytest.fixture(scope="module")
def address(small):
    with running(small, model="letters", api_key="k", about={"draft": "hydra++", "tree": "small"}) as (address, _):
        yield address


def test_the_page_loads_nothing_from_other_hosts(address):
    page = httpx.get(f"{address}/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    linked = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert sorted(linked) == ["data:,", "page.css", "page.js"]
    for name, kind in (("page.css", "text/css"), ("page.js", "javascript")):
        assert kind in httpx.get(f"{address}/{name}").headers["content-type"]
    assert not re.search(r"https?://|innerHTML", page.text + httpx.get(f"{address}/page.js").text)
    assert httpx.get(f"{address}/app.py").status_code == 404
    assert httpx.get(f"{address}/../app.py").status_code == 404


def test_models_have_their_draft_and_tree(address):
    (model,) = httpx.get(f"{address}/v1/models", headers={"authorization": "Bearer k"}).json()["data"]
    assert model["id"] == "letters"
    assert model["hydrajax"] == {"conversations": True, "draft": "hydra++", "tree": "small"}


def test_every_event_marks_drafted_tokens(address, served):
    """All tokens of a step except the first one are drafted; the tokens join to the text."""
    (wanted,) = expected(served, ["a bad cafe"], limit=30)
    options = {"include_drafts": True, "include_usage": True}
    body = {"prompt": "a bad cafe", "max_tokens": 30, "stream": True, "stream_options": options}
    found = []
    with httpx.stream(
        "POST", f"{address}/v1/completions", json=body, headers={"authorization": "Bearer k"}, timeout=SECONDS
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line.removeprefix("data: ")).get("hydrajax", {}).get("tokens", [])
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


def test_counts_are_added_up(small):
    batchers = [Batcher(small), Batcher(small)]
    batchers[0].submit([batchers[0].request([1, 2], max_new_tokens=3)])
    stats = total(batchers)
    assert (stats.requests, stats.waiting) == (1, 1)
    assert stats.limit_nbytes == 2 * batchers[1].stats().limit_nbytes
    assert stats.failed is False


@pytest.mark.slow
def test_a_plain_step_takes_time(served):
    executor = make_executor(served, served.program(tree="root", max_new_tokens=16))
    assert 1e-6 < plain_step_seconds(executor) < 1
