"""Bases of other quantisers."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import numpy as safetensors_numpy

from helpers.low_bit_layers import CASES
from helpers.released import save


@pytest.fixture(scope="module")
def float_checkpoint(llama_checkpoint) -> Path:
    """A float checkpoint whose linear layers have 32 or 96 inputs."""
    return llama_checkpoint(intermediate_size=96)


@pytest.fixture
def quantised(float_checkpoint, tmp_path) -> Callable:
    """``quantised(case, skip=("lm_head",), kind="safetensors", **fields) -> (directory, float state dict)``.

    Every linear layer outside ``skip`` is random. ``kind``: of files, see `released.save`. ``fields`` change
    ``quantization_config``.
    """

    def make(case: str, skip=("lm_head",), kind="safetensors", **fields):
        config, pack, settings = CASES[case]
        rng, tensors, weights = np.random.default_rng(0), {}, {}
        for name, tensor in safetensors_numpy.load_file(float_checkpoint / "model.safetensors").items():
            layer = name.removesuffix(".weight")
            if ("_proj" in name or layer == "lm_head") and layer not in skip:
                parts, weights[name] = pack(rng, *tensor.shape, **settings)
                tensors |= {f"{layer}.{part}": x for part, x in parts.items()}
            else:
                tensors[name] = weights[name] = tensor
        raw = json.loads((float_checkpoint / "config.json").read_text())
        raw |= {"quantization_config": config | fields, "dtype": "bfloat16"}
        return save(tmp_path / case, {name: to_torch(x) for name, x in tensors.items()}, raw, kind), weights

    return make


def to_torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == jnp.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))
