"""Bases of other quantisers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from helpers.low_bit_layers import CASES
from hydrajax.formats.tensors import save_safetensors


@pytest.fixture(scope="module")
def float_checkpoint(llama_checkpoint) -> Path:
    """A float checkpoint whose linear layers have 32 or 96 inputs."""
    return llama_checkpoint(intermediate_size=96)


@pytest.fixture
def quantised(float_checkpoint, tmp_path) -> Callable:
    """``quantised(case, skip=("lm_head",), save=..., **fields) -> (directory, float state dict)``.

    Every linear layer outside ``skip`` is random. ``fields`` change ``quantization_config``.
    """

    def make(case: str, skip=("lm_head",), save=None, **fields):
        config, pack, settings = CASES[case]
        rng, tensors, weights = np.random.default_rng(0), {}, {}
        for name, tensor in safetensors_numpy.load_file(float_checkpoint / "model.safetensors").items():
            layer = name.removesuffix(".weight")
            if ("_proj" in name or layer == "lm_head") and layer not in skip:
                parts, weights[name] = pack(rng, *tensor.shape, **settings)
                tensors |= {f"{layer}.{part}": x for part, x in parts.items()}
            else:
                tensors[name] = weights[name] = tensor
        directory = Path(shutil.copytree(float_checkpoint, tmp_path / case))
        raw = json.loads((directory / "config.json").read_text()) | {"quantization_config": config | fields}
        (directory / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
        (directory / "model.safetensors").unlink()
        if save is None:
            save_safetensors(directory / "model.safetensors", tensors)
        else:
            save(directory, tensors)
        return directory, weights

    return make
