"""`Server` in Python, and `hydrajax serve` as a process: starts, shutdowns, and answers of the shipped model."""

import asyncio
import dataclasses
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import hydrajax
from helpers.letters import TREE
from helpers.serving import SECONDS, expected, serving
from hydrajax import assets
from hydrajax.certify.servers.client import Client
from hydrajax.cli import main
from hydrajax.cli.serve import FLAGS
from hydrajax.errors import HydrajaxError
from hydrajax.optional_deps import needs
from hydrajax.serve import Server, ServerOptions
from hydrajax.serve.served_models import base_names
from hydrajax.trees import presets

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


def test_the_model_has_the_name_of_its_base_and_other_names_stay_valid(served, tmp_path):
    assert base_names(None) == ["hydrajax"]
    assert base_names("org/model@main") == ["org/model", "org/model@main", "hydrajax"]
    assert base_names(str(tmp_path / "..")) == [tmp_path.parent.name, f"{tmp_path}/..", "hydrajax"]
    (tmp_path / "small-q4.gguf").touch()
    assert base_names(f"{tmp_path}/small-q4.gguf")[0] == "small-q4"
    loaded = dataclasses.replace(served, base_name="org/letters@main")
    for options, first, others in (
        ({"also": ["none"]}, "org/letters", ("org/letters@main", "hydrajax")),
        ({"also": ["none"], "name": "mine"}, "mine", ("org/letters", "org/letters@main", "hydrajax")),
        ({"also": {"hydrajax": "none"}}, "org/letters", ("org/letters@main",)),
    ):
        with (
            Server(loaded, **OPTIONS | options) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as client,
        ):
            listed = [model.id for model in client.models.list()]
            assert listed == [first, "hydrajax" if "hydrajax" not in others else f"{first}:none"]
            for other in others:
                assert client.models.retrieve(other).id == first
                assert ":none" not in listed[1] or client.models.retrieve(f"{other}:none").id == listed[1]
            assert Client("server", server.url, model=others[0]).model == others[0]
    assert hydrajax.load("shipped").base_name == "shipped"


NEW = 60
SHIPPED = ("--base", "shipped", "--draft", "hydra++", "--tree", "chain-2", "--slots", "2", "--no-warm-up")


@pytest.mark.slow
def test_answers_of_the_shipped_model_and_a_clean_shutdown():
    """Requests that run at the signal are finished."""
    loaded = hydrajax.load("shipped", "hydra++")
    prompts = ["def quicksort(items):\n", "import os\n\nclass Walker:\n    def __init__(self"]
    wanted = loaded.generate(prompts, tree=presets.chain(2), max_new_tokens=NEW, batch_size=2)
    with serving(*SHIPPED, "--grace", 60, "--template", "plain", api_key="k") as (process, address, log):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", timeout=300, max_retries=0)
        assert log[0] == "loading ..."
        assert log[-1] == repr(loaded)
        answer = client.completions.create(model="hydrajax", prompt=prompts, max_tokens=NEW)
        assert [choice.text for choice in answer.choices] == [result.text for result in wanted]
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
        events = client.completions.create(model="hydrajax", prompt=prompts[0], max_tokens=NEW, stream=True)
        text = next(events).choices[0].text
        process.send_signal(signal.SIGTERM)
        text += "".join(event.choices[0].text for event in events)
        assert text == wanted[0].text
        assert process.wait(60) == 0
    with serving(*SHIPPED, "--grace", 0, "--template", "plain", api_key="k") as (process, address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", timeout=300, max_retries=0)
        events = client.completions.create(model="hydrajax", prompt=prompts[0], max_tokens=900, stream=True)
        pieces = [next(events).choices[0]]
        process.send_signal(signal.SIGINT)
        pieces += [event.choices[0] for event in events]
        assert pieces[-1].finish_reason == "length"  # a partial answer
        assert process.wait(60) == 130


@pytest.mark.slow
def test_eight_clients_of_a_model_on_six_devices(monkeypatch):
    """Every answer is the text of one device."""
    names = ("area", "total", "first", "last", "head", "count", "merge", "split")
    prompts = [f"def {name}(items):\n" for name in names]
    wanted = hydrajax.load("shipped", "hydra++").generate(prompts, tree=presets.chain(2), max_new_tokens=16)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "6")
    with serving(*SHIPPED, "--mesh", "data=2,model=3") as (_, address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", timeout=300, max_retries=0)

        def ask(prompt: str) -> str:
            return client.completions.create(model="hydrajax", prompt=prompt, max_tokens=16).choices[0].text

        with ThreadPoolExecutor(len(prompts)) as clients:
            assert list(clients.map(ask, prompts)) == [result.text for result in wanted]


def test_every_option_has_a_flag():
    of_the_command = {name for names in FLAGS.values() for name in names}
    assert ServerOptions.model_fields.keys() - of_the_command == {"body_timeout", "write_timeout"}


def test_bad_options_are_refused_before_the_model_is_loaded(capfd, monkeypatch):
    def said(*options: str) -> str:
        assert main(["serve", "--base", "nowhere", *options]) == 2
        err = capfd.readouterr().err.removeprefix("loading ...\n")
        assert err.count("\n") == 1
        return err

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"--port: cannot listen on 127.0.0.1 port {port}: " in said("--port", str(port))
    for name, value, message in (
        ("port", "99999", "got 99999, expected at most 65535"),
        ("host", "", "got '', expected an address; 127.0.0.1 is reached from this machine only"),
        ("name", "\udcff", "got '\\udcff', expected printable characters"),
        ("api-key", "", "got an empty key; to serve without a key, leave it out"),
        ("api-key", "\udcff", "got a key that no header can hold"),
    ):
        assert f"--{name}: {message}" in said(f"--{name}", value)
    assert "--port: cannot listen on a..b port 8000" in said("--host", "a..b")
    for key in ("", "\udcff"):
        monkeypatch.setenv("HYDRAJAX_API_KEY", key)
        assert "HYDRAJAX_API_KEY: got a" in said()  # before the base is looked for
    assert "--base: no such directory" in said("--api-key", "k", "--port", "0")


def test_missing_packages_are_named(monkeypatch, capfd):
    for module in [name for name in sys.modules if name.startswith("hydrajax.serve.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert main(["serve", "--base", str(assets.base())]) == 2
    assert needs("starlette") in capfd.readouterr().err
