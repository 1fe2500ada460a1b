"""The chat page in a browser, in front of a server of the shipped model with two drafts."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the server compiles
for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "playwright"):
    pytest.importorskip(package, reason=f"{package} is not installed (hydrajax[test])")

import httpx  # noqa: E402
from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402

from helpers import letters  # noqa: E402
from helpers.contrast import colours, contrast, luminance  # noqa: E402
from helpers.serving import SECONDS, running, serving  # noqa: E402
from hydrajax import assets  # noqa: E402
from hydrajax.serve.batcher import Batcher  # noqa: E402
from hydrajax.serve.pool import Sizes  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CONTEXT = 240  # with pieces of 16 tokens a cache of one size: few pool to compile
SCRIPT = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'> & so on"
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = next(filter(None, map(shutil.which, BROWSERS)), own)
        if not Path(path).exists():
            pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}, or that of 'playwright install chromium'")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # which root cannot have
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """One row at a time."""
    base = shutil.copytree(assets.base(), tmp_path_factory.mktemp("models") / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    options = ["--base", base, "--draft", "hydra++", "--tree", "chain-2", "--also", "none", "--template", "plain"]
    with serving(*options, "--slots", 1, "--chunk", 16) as (_, address, said):
        assert said[:2] == ["loading ...", "compiling ..."]
        yield address


@pytest.fixture
def opened(browser):
    """``opened(address, refusals=0, **settings)``: the page, in a window of its own.

    At the end nothing was asked of anybody else, no script has failed, and so many requests were refused, which the
    browser writes to the console by itself.
    """
    checks = []
    with contextlib.ExitStack() as stack:

        def open_page(address: str, refusals: int = 0, **settings) -> Page:
            page = stack.enter_context(contextlib.closing(browser.new_context(**settings))).new_page()
            failed, said, asked = [], [], []
            page.on("pageerror", lambda error: failed.append(str(error)))
            page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: asked.append(request.url))
            checks.append((address, refusals, failed, said, asked))
            page.goto(address)
            return page

        yield open_page
        for address, refusals, failed, said, asked in checks:
            assert failed == []
            assert len(said) == refusals, said
            assert all("Failed to load resource" in message for message in said)
            assert asked
            assert all(url.startswith(f"{address}/") for url in asked), asked


@pytest.fixture
def page(opened, address):
    found = opened(address, viewport={"width": 1100, "height": 800})
    expect(found.locator("#model option")).to_have_count(2)
    return found


def send(page: Page, text: str, tokens: int = 60) -> dict:
    """Ask the model, and what was asked of the server for it."""
    page.fill("#max_tokens", str(tokens))
    page.fill("#prompt", text)
    with page.expect_request(lambda request: request.method == "POST") as sent:
        page.click("#send")
    return sent.value.post_data_json


def ended(page: Page) -> Page:
    expect(page.locator("#stop")).to_be_hidden()
    return page


def whole(address: str, body: dict) -> dict:
    """The interface's answer to what the page has asked, in one piece."""
    plain = {name: value for name, value in body.items() if not name.startswith("stream")}
    kind = "chat/completions" if "messages" in body else "completions"
    answer = httpx.post(f"{address}/v1/{kind}", json=plain, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metric(address: str, name: str) -> float:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"hydrajax_{name} "))


def until_idle(address: str) -> None:
    end = time.monotonic() + 60
    while metric(address, "running"):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_answer_streams_and_is_that_of_the_interface(page, address):
    """Its tokens are coloured as the interface counts them, and its figures are numbers."""
    page.evaluate(
        """() => {
            window.lengths = [];
            const messages = document.getElementById("messages");
            const note = () => window.lengths.push(messages.querySelector(".assistant .text")?.textContent.length);
            new MutationObserver(note).observe(messages, { childList: true, subtree: true });
        }"""
    )
    body = send(page, "def quicksort(items):")
    ended(page)
    wanted = whole(address, body)
    usage = wanted["usage"]
    tokens, drafted = usage["completion_tokens"], usage["completion_tokens_details"]["accepted_prediction_tokens"]
    answer = page.locator("article.assistant")
    assert answer.locator(".text").text_content() == wanted["choices"][0]["message"]["content"]
    assert page.locator("article.user .text").text_content() == "def quicksort(items):"
    assert len(set(page.evaluate("window.lengths.filter((length) => length)"))) > 2
    assert answer.locator(".drafted").count() == drafted > 0
    assert answer.locator(".own").count() == tokens - drafted > 0

    figures = answer.locator(".figures").text_content()
    number = r"(\d+(?:\.\d+)?)"
    tau, count, steps, _ = numbers(rf"{number} tokens per step · {number} tokens in {number} steps · {number}", figures)
    assert (count, steps) == (tokens, tokens - drafted)
    assert tau == pytest.approx(tokens / steps, abs=0.006)
    rate, seconds = numbers(rf"{number} tokens/s · {number} s ·", figures)
    assert rate > 0
    assert seconds > 0
    without, plain_step = numbers(rf"without a draft {number} s at {number} ms a token", figures)
    assert without == pytest.approx(tokens * plain_step / 1e3, abs=0.01)
    assert numbers(rf"first token after {number} s", figures)


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return [float(part) for part in found.groups()]


def test_what_is_chosen_is_what_is_asked(page, address):
    first = send(page, "a", tokens=3)
    models = [model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]]
    assert page.locator("#model option").all_text_contents() == ["hydra++, chain-2", "no draft"]
    assert (first["model"], first["temperature"], first["max_tokens"]) == (models[0], 0, 3)
    assert "seed" not in first
    assert [message["content"] for message in first["messages"]] == ["a"]
    ended(page)
    page.select_option("#model", models[1])
    page.select_option("#rule", "exact")
    for name, value in {"temperature": 0.9, "top_p": 0.8, "seed": 7}.items():
        page.fill(f"#{name}", str(value))
    second = send(page, "b", tokens=20)
    numbers = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "max_tokens": 20}
    assert second | numbers | {"model": models[1]} == second
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    ended(page)
    answer = page.locator("article.assistant").last
    assert answer.locator(".text").text_content() == whole(address, second)["choices"][0]["message"]["content"]
    assert answer.locator(".drafted").count() == 0
    assert answer.locator("h2").text_content() == "Model · no draft"
    assert "seed 7" in answer.locator(".figures").text_content()

    page.fill("#temperature", "9")  # which nobody sees any more when the rule is greedy
    page.select_option("#rule", "greedy")
    page.select_option("#form", "text")
    third = send(page, "def f(", tokens=20)
    assert third | {"temperature": 0, "prompt": "def f("} == third
    assert "messages" not in third
    ended(page)
    text = page.locator("article.text .text").text_content()
    assert text == "def f(" + whole(address, third)["choices"][0]["text"]


def test_stop_frees_the_row_and_new_forgets(page, address):
    cancelled = metric(address, "cancelled_total")
    page.select_option("#rule", "exact")
    page.fill("#temperature", "2")  # which hardly ever ends by itself
    send(page, "import os", tokens=150)
    expect(page.locator("article.assistant .text")).not_to_be_empty()
    page.click("#stop")
    ended(page)
    until_idle(address)
    assert metric(address, "cancelled_total") == cancelled + 1
    assert page.locator("#error").text_content() == ""
    stopped = page.locator("article.assistant .text").text_content()
    again = send(page, "go on", tokens=100)
    assert [message["content"] for message in again["messages"]] == ["import os", stopped, "go on"]
    expect(page.locator("article.assistant .text").nth(1)).not_to_be_empty()
    page.click("#clear")
    ended(page)
    expect(page.locator("article")).to_have_count(0)
    until_idle(address)
    assert [message["content"] for message in send(page, "anew", tokens=3)["messages"]] == ["anew"]
    ended(page)


def test_text_is_never_markup(page):
    """Neither what the user writes nor what the model says."""
    halves = [SCRIPT[:40], SCRIPT[40:]]
    events = [
        {
            "choices": [{"index": 0, "delta": {"content": half}, "finish_reason": None}],
            "hydrajax": {"tokens": [{"text": half if coloured else "?", "drafted": True}]},
        }
        for half, coloured in zip(halves, (True, False), strict=True)
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    send(page, SCRIPT)
    ended(page)
    assert page.locator("article.user .text").text_content() == SCRIPT
    assert page.locator("article.assistant .text").text_content() == SCRIPT
    assert page.locator("#messages :is(script, img)").count() == 0
    assert page.evaluate("window.ran") is None


def test_errors_are_said_in_words(opened, address):
    """Before an answer, and in the middle of one."""
    page = opened(address, refusals=1)
    expect(page.locator("#model option")).to_have_count(2)
    send(page, "a = 1\n" * 200)
    expect(page.locator("#error")).to_contain_text("tokens, expected at most the model's context of 240")
    assert send(page, "shorter", tokens=3)["messages"] == [{"role": "user", "content": "shorter"}]
    ended(page)
    assert page.locator("#error").text_content() == ""
    broken = 'data: {"error": {"message": "the server has failed: no memory"}}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=broken))
    send(page, "and now")
    expect(page.locator("#error")).to_have_text("the server has failed: no memory")
    ended(page)


def test_a_key_is_asked_for_and_a_full_queue_said(opened, served, monkeypatch):
    """A server whose only row is taken, as its batcher does nothing for a while."""
    goes_on, turn = threading.Event(), Batcher._turn
    monkeypatch.setattr(Batcher, "_turn", lambda batcher: (goes_on.wait(), turn(batcher)))
    pool = letters.pool(served, Sizes(rows=1, chunk=16, places=128))
    about = {"draft": "medusa", "tree": "small"}
    with running(pool, queue=0, api_key="k", about=about) as (address, batcher):
        page = opened(address, refusals=3)
        expect(page.locator("#error")).to_have_text("the API key is missing or wrong")
        for key in ("wrong", "k"):
            with page.expect_response("**/v1/models"):
                page.fill("#key", key)
                page.press("#key", "Tab")
        expect(page.locator("#model option")).to_have_text(["medusa, small"])
        expect(page.locator("#error")).to_have_text("")
        assert page.locator("#key").is_visible()
        (other,) = batcher.submit([batcher.request([1, 2, 3])])
        send(page, "abc")
        expect(page.locator("#error")).to_have_text("the queue of 0 requests is full; try again later")
        assert page.input_value("#prompt") == "abc"  # to be sent again
        expect(page.locator("article")).to_have_count(0)
        batcher.cancel(other)
        goes_on.set()


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 390])
def test_everything_is_in_sight_and_can_be_read(opened, address, tmp_path, width, scheme):
    """No sideways scrolling, and the contrast that WCAG asks for; the pictures are for who looks at them."""
    page = opened(address, viewport={"width": width, "height": 800}, color_scheme=scheme)
    expect(page.locator("#model option")).to_have_count(2)
    page.screenshot(path=tmp_path / "empty.png")
    page.select_option("#rule", "exact")
    page.fill("#seed", "1")
    send(page, "def quicksort(items):\n    " + "x" * 100, tokens=60)
    ended(page)
    page.screenshot(path=tmp_path / "answered.png")
    page.evaluate("document.getElementById('error').textContent = 'the queue of 0 requests is full; try again later'")
    page.evaluate("document.getElementById('key_label').hidden = document.getElementById('stop').hidden = false")
    page.screenshot(path=tmp_path / "all.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('messages').scrollWidth") <= width
    for name in ("send", "stop", "clear", "prompt", "key", "seed"):
        box = page.locator(f"#{name}").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert 0 <= box["y"] <= box["y"] + box["height"] <= 800
    places = "body", "label", ".text .drafted", ".text .own", ".figures", "#error", "#send", "#stop", ".user .text"
    for place in places:
        assert contrast(page, place) >= 4.5, place
    dark = luminance(colours(page, "body")[1]) < 0.5
    assert dark == (scheme == "dark")
