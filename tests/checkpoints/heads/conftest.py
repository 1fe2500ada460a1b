"""The tiny checkpoint as the base of heads: loaded, and its files' content."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from hydrajax.checkpoints.base import load_llama
from hydrajax.models.base import BoundBase


@pytest.fixture(scope="module")
def base(tiny_checkpoint) -> BoundBase:
    return BoundBase(*load_llama(tiny_checkpoint))


@pytest.fixture(scope="module")
def base_state(tiny_checkpoint) -> dict:
    return load_file(tiny_checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def base_config(tiny_checkpoint) -> dict:
    return json.loads((tiny_checkpoint / "config.json").read_text())
