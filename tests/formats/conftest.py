"""A tiny base, its files' content, and the Hub as huggingface_hub sees it: a small server in this process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.every_format import write_formats
from helpers.fake_hub import FakeHub
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.base_model import BoundBase


@pytest.fixture(scope="module")
def _no_proxy():
    """One HTTP client for all tests, as it is slow to create; it ignores proxies of the environment."""
    from huggingface_hub import close_session

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("NO_PROXY", "no_proxy"):
            patch.setenv(variable, "127.0.0.1")
        close_session()
        yield
        close_session()


@pytest.fixture
def hub(_no_proxy, tmp_path, monkeypatch):
    """A running `FakeHub` in place of the Hub, with an empty cache and no login."""
    from huggingface_hub import constants

    server = FakeHub()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)  # read from the environment when it was imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
    monkeypatch.chdir(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def base(tiny_checkpoint) -> BoundBase:
    return BoundBase(*load_llama(tiny_checkpoint))


@pytest.fixture(scope="module")
def base_state(tiny_checkpoint) -> dict:
    return load_file(tiny_checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def base_config(tiny_checkpoint) -> dict:
    return json.loads((tiny_checkpoint / "config.json").read_text())


@pytest.fixture(scope="session")
def formats(tmp_path_factory) -> Path:
    """Return a folder with a directory of every format (`helpers.every_format`), which tests must not change."""
    write_formats(root := tmp_path_factory.mktemp("formats"))
    return root
