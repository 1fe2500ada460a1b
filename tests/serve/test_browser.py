"""The chat page in a browser, on a server of the shipped model with two drafts."""

import contextlib
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the server compiles
pytest.importorskip("playwright", reason="playwright is not installed (hydrajax[test])")

import httpx  # noqa: E402
from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402

from helpers import letters  # noqa: E402
from helpers.serving import SECONDS, running, serving  # noqa: E402
from hydrajax import assets  # noqa: E402
from hydrajax.serve.batcher import Batcher  # noqa: E402
from hydrajax.serve.executor_pool import PoolSizes  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CONTEXT = 240  # with chunks of 16 tokens there is a single cache length, so that few programs compile
SCRIPT = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'> & so on"
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = next(filter(None, map(shutil.which, BROWSERS)), own)
        if not Path(path).exists():
            pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}, or that of 'playwright install chromium'")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root cannot use the sandbox
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server with a single slot."""
    base = shutil.copytree(assets.base(), tmp_path_factory.mktemp("models") / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    options = ["--base", base, "--draft", "hydra++", "--tree", "chain-2", "--also", "none", "--template", "plain"]
    with serving(*options, "--slots", 1, "--chunk", 16) as (_, address, log):
        assert log[0] == "loading ..."
        end = time.monotonic() + SECONDS
        while "plain_step_seconds" not in httpx.get(f"{address}/v1/models").json()["data"][0]["hydrajax"]:
            assert time.monotonic() < end
            time.sleep(0.2)
        yield address


@pytest.fixture
def opened(browser):
    """``opened(address, refusals=0, **settings)``: the page in a new window.

    At the end, checks that no other host was contacted, that no script failed, and the number of refused requests, each
    of which the browser logs to the console.
    """
    checks = []
    with contextlib.ExitStack() as stack:

        def open_page(address: str, refusals: int = 0, **settings) -> Page:
            page = stack.enter_context(contextlib.closing(browser.new_context(**settings))).new_page()
            failed, logged, requested = [], [], []
            page.on("pageerror", lambda error: failed.append(str(error)))
            page.on("console", lambda message: logged.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: requested.append(request.url))
            checks.append((address, refusals, failed, logged, requested))
            page.goto(address)
            return page

        yield open_page
        for address, refusals, failed, logged, requested in checks:
            assert failed == []
            assert len(logged) == refusals, logged
            assert all("Failed to load resource" in message for message in logged)
            assert requested
            assert all(url.startswith(f"{address}/") for url in requested), requested


@pytest.fixture
def page(opened, address):
    found = opened(address, viewport={"width": 1100, "height": 800})
    expect(found.locator("#model option")).to_have_count(2)
    return found


def send(page: Page, text: str, tokens: int = 60) -> dict:
    """Send a message and return the request's body."""
    page.fill("#max_tokens", str(tokens))
    page.fill("#prompt", text)
    with page.expect_request(lambda request: request.method == "POST") as sent:
        page.click("#send")
    return sent.value.post_data_json


def ended(page: Page) -> Page:
    expect(page.locator("#stop")).to_be_hidden()
    return page


def whole(address: str, body: dict) -> dict:
    """The API's whole answer to a request of the page."""
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


def test_an_answer_streams_and_equals_the_api(page, address):
    """Its colours agree with the API's counts, and its figures are numbers."""
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
    without, plain_step = numbers(rf"without a draft {number} s at {number} ms per token", figures)
    assert without == pytest.approx(tokens * plain_step / 1e3, abs=0.01)
    assert numbers(rf"first token after {number} s", figures)


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return [float(part) for part in found.groups()]


def test_the_settings_are_sent(page, address):
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

    page.fill("#temperature", "9")  # invalid, but hidden under the greedy rule
    page.select_option("#rule", "greedy")
    page.select_option("#form", "text")
    third = send(page, "def f(", tokens=20)
    assert third | {"temperature": 0, "prompt": "def f("} == third
    assert "messages" not in third
    ended(page)
    text = page.locator("article.text .text").text_content()
    assert text == "def f(" + whole(address, third)["choices"][0]["text"]


def test_stop_frees_the_slot_and_new_starts_over(page, address):
    cancelled = metric(address, "cancelled_total")
    page.select_option("#rule", "exact")
    page.fill("#temperature", "2")  # rarely ends by itself
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
    """Neither the user's nor the model's text."""
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


def test_errors_are_shown(opened, address):
    """Before an answer and during one."""
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


def test_a_missing_key_and_a_full_queue(opened, served, monkeypatch):
    """A server whose only slot is taken while its batcher is paused."""
    resume, iterate = threading.Event(), Batcher._iterate
    monkeypatch.setattr(Batcher, "_iterate", lambda batcher: (resume.wait(), iterate(batcher)))
    pool = letters.pool(served, PoolSizes(slots=1, chunk=16, cache_len=128))
    about = {"draft": "medusa", "tree": "small"}
    with running(pool, queue=0, api_key="k", about=about) as (address, batcher):
        page = opened(address, refusals=3)
        expect(page.locator("#error")).to_have_text(
            "the API key is missing or wrong, expected the header 'Authorization: Bearer KEY'"
        )
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
        assert page.input_value("#prompt") == "abc"  # kept for another try
        expect(page.locator("article")).to_have_count(0)
        batcher.cancel(other)
        resume.set()


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (390, "dark")])
def test_everything_is_visible_and_readable(opened, address, tmp_path, width, scheme):
    """No horizontal scrolling, and WCAG's contrast; the screenshots are for a human reader."""
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


def contrast(page, place: str) -> float:
    """Return the contrast ratio (WCAG 2, from 1 to 21) of the text of the first such element and its background."""
    darker, lighter = sorted(map(luminance, colours(page, place)))
    return (lighter + 0.05) / (darker + 0.05)


def colours(page, place: str) -> list[list[float]]:
    """Return the colours of text and background: red, green and blue from 0 to 255."""
    found = page.locator(place).first.evaluate(
        """(element) => {
            const style = (at) => getComputedStyle(at);
            let behind = element;
            while (style(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [style(element).color, style(behind).backgroundColor];
        }"""
    )
    return [[float(part) for part in re.findall(r"[\d.]+", colour)[:3]] for colour in found]


def luminance(colour: list[float]) -> float:
    """Return the relative luminance, from 0 to 1."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
