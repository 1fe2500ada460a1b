"""``hydrajax serve`` as a process: shutdown, errors, and answers of the shipped model."""

from __future__ import annotations

import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import hydrajax
from hydrajax import assets
from hydrajax.cli import main
from hydrajax.optional_deps import needs
from hydrajax.trees import presets

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "openai")
NEW = 60
OPTIONS = ("--base", "shipped", "--draft", "hydra++", "--tree", "chain-2", "--slots", "2", "--no-warm-up")


@pytest.mark.slow
def test_answers_of_the_shipped_model_and_a_clean_shutdown():
    """Requests that run at the signal are finished."""
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    import openai

    from helpers.serving import serving

    loaded = hydrajax.load("shipped", "hydra++")
    prompts = ["def quicksort(items):\n", "import os\n\nclass Walker:\n    def __init__(self"]
    wanted = loaded.generate(prompts, tree=presets.chain(2), max_new_tokens=NEW, batch_size=2)
    with serving(*OPTIONS, "--grace", 60, "--template", "plain", api_key="k") as (process, address, log):
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
    with serving(*OPTIONS, "--grace", 0, "--template", "plain", api_key="k") as (process, address, _):
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
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    import openai

    from helpers.serving import serving

    prompts = [
        f"def {name}(items):\n" for name in ("area", "total", "first", "last", "head", "count", "merge", "split")
    ]
    wanted = hydrajax.load("shipped", "hydra++").generate(prompts, tree=presets.chain(2), max_new_tokens=16)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "6")
    with serving(*OPTIONS, "--mesh", "data=2,model=3") as (_, address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", timeout=300, max_retries=0)

        def ask(prompt: str) -> str:
            return client.completions.create(model="hydrajax", prompt=prompt, max_tokens=16).choices[0].text

        with ThreadPoolExecutor(len(prompts)) as clients:
            assert list(clients.map(ask, prompts)) == [result.text for result in wanted]


def test_a_busy_port_and_bad_numbers_are_refused_before_the_model_is_loaded(capfd):
    pytest.importorskip("starlette", reason="starlette is not installed")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for options, message in (
            (["--port", str(port)], f"--port: cannot listen on 127.0.0.1 port {port}: "),
            (["--port", "99999"], "--port: got 99999, expected at most 65535"),
            (["--grace", "-1"], "--grace: got -1, expected at least 0"),
            (["--temperature", "-1"], "--temperature: got -1.0, expected at least 0"),
            (["--slots", "0"], "--slots: got"),
            (["--host", ""], "--host: got '', expected an address; 127.0.0.1 is reached from this machine only"),
            (["--host", "\udcff"], "--host: got '\\udcff', expected an address"),
            (["--host", "a..b"], "--port: cannot listen on a..b port 8000"),
            (["--name", "\udcff"], "--name: got '\\udcff', expected printable characters"),
            (["--name", ""], "--name: got '', expected printable characters"),
            (["--api-key", ""], "--api-key: got an empty key; to serve without a key, leave it out"),
            (["--api-key", "\udcff"], "--api-key: got a key that no header can hold"),
            (["--api-key", "a key\n"], "--api-key: got a key that no header can hold"),
        ):
            assert main(["serve", "--base", "nowhere", *options]) == 2
            err = capfd.readouterr().err
            assert message in err
            assert len(err.splitlines()) == 1


def test_a_bad_key_in_the_environment_is_refused(capfd, monkeypatch):
    for key in ["", "\udcff"]:
        pytest.importorskip("starlette", reason="starlette is not installed")
        monkeypatch.setenv("HYDRAJAX_API_KEY", key)
        assert main(["serve", "--base", "nowhere"]) == 2
        assert "HYDRAJAX_API_KEY: got a" in capfd.readouterr().err
        assert main(["serve", "--base", "nowhere", "--api-key", "k", "--port", "0"]) == 2
        assert "--base: no such directory" in capfd.readouterr().err


def test_missing_packages_are_named(monkeypatch, capfd):
    for module in [name for name in sys.modules if name.startswith("hydrajax.serve.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert main(["serve", "--base", str(assets.base())]) == 2
    assert needs("starlette") in capfd.readouterr().err
