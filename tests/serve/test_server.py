"""`hydrajax.serve.Server` in Python: in a notebook, started again, stopped during a request, and wrong options."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "openai", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed (hydrajax[serve], hydrajax[test])")

import openai  # noqa: E402

from helpers.letters import TREE  # noqa: E402
from helpers.serving import SECONDS, expected  # noqa: E402
from hydrajax.errors import HydrajaxError  # noqa: E402
from hydrajax.serve import Server  # noqa: E402

OPTIONS = {"tree": TREE, "port": 0, "slots": 1, "warm_up": False}


@pytest.fixture(scope="module")
def server(served) -> Server:
    """A server that the tests start and stop; its programs stay compiled."""
    return Server(served, **OPTIONS)


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def ask(url: str, **settings) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=SECONDS, max_retries=0)
    with client:
        answer = client.completions.create(model="hydrajax", prompt="abc", **settings)
    return answer.choices[0].text


def test_a_notebook_cell_starts_asks_and_stops_twice(served, server):
    """Within a running event loop. No thread is left, and the port is free again."""
    (wanted,) = expected(served, ["abc"], limit=12)

    async def cell(listener: socket.socket) -> None:
        server.start(listener)
        assert server.start() is server
        assert server.url == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert ask(server.url, max_tokens=12) == wanted.text
        assert server.stop()

    before = names()
    for _ in range(2):
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        asyncio.run(cell(listener))
        assert names() == before
        socket.create_server(address).close()
        assert server.stop()  # again, which does nothing
        with pytest.raises(HydrajaxError, match=r"^url: the server is not running; call start\(\)$"):
            _ = server.url


def test_a_running_request_ends_within_the_grace(server, monkeypatch):
    kind = type(server._pools["hydrajax"].executor)
    advance, stepped = kind.advance, threading.Event()
    monkeypatch.setattr(
        kind, "advance", lambda *args, **more: (stepped.set(), time.sleep(0.05), advance(*args, **more))[2]
    )
    with server:
        texts: list[str] = []
        long = {"max_tokens": 80, "logit_bias": {"16": -100}}
        client = threading.Thread(target=lambda url: texts.append(ask(url, **long)), args=(server.url,))
        client.start()
        assert stepped.wait(SECONDS)
        began = time.monotonic()
        assert not server.stop(grace=0.2)
        assert time.monotonic() - began < 5
        client.join(SECONDS)
    assert 0 < len(texts[0]) < 80


def test_wrong_options_are_refused_before_anything_starts(served):
    before = names()
    for options, message in (
        ({"slots": 0}, "slots: got 0, expected at least 1"),
        ({"slots": "8"}, "slots: got '8', expected an integer"),
        ({"slotz": 8}, "slotz: this field is not supported"),
        ({"port": 70000}, "port: got 70000, expected at most 65535"),
        ({"temperature": float("nan")}, "temperature: got NaN, expected "),
        ({"api_key": ""}, "api_key: got an empty key"),
        ({"name": "a\n"}, r"name: got 'a\n', expected printable characters without outer spaces"),
        ({"also": ["none", "none"]}, "name: got hydrajax:none twice, expected different names"),
        ({"also": {"hydrajax": "none"}}, "name: got hydrajax twice, expected different names"),
        ({"also": ["none@oak"]}, "tree: "),
        ({"also": {"two": 3}}, "also: got int for two, expected 'DRAFT[@TREE]' or a model that with_draft has made"),
        ({"template": "oak"}, "template: got 'oak'"),
    ):
        with pytest.raises(HydrajaxError) as caught:
            Server(served, **OPTIONS | options)
        assert str(caught.value).startswith(message)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HydrajaxError, match=f"^port: cannot listen on 127.0.0.1 port {port}: "):
            Server(served, **OPTIONS | {"port": port}).start()
    assert names() == before


def test_several_models_share_the_cache_memory(served):
    """The limit is that of all models together."""
    also = {"plain": "none", "same": served}
    server = Server(served, **OPTIONS | {"also": also, "cache_memory": 100, "about": {"draft": "mine"}})
    with server:
        assert list(server.batchers) == ["hydrajax", "plain", "same"]
        assert len({id(batcher.memory) for batcher in server.batchers.values()}) == 1
        assert server.batchers["plain"].memory.limit == 100e6
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS) as client:
            found = {model.id: model.hydrajax for model in client.models.list()}
    assert found["hydrajax"] == {"conversations": True, "draft": "mine", "tree": f"{TREE.size} nodes"}
    assert found["plain"]["draft"] == "none"
    assert found["same"]["draft"]
