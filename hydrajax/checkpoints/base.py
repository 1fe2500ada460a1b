"""The base from a Hugging Face directory: ``config.json`` and its weights, as safetensors or PyTorch files.

Every key of the files must be known and every key of the model present with the right shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.checkpoints.tensors import check_directory, expect_tensors, open_model, read_json
from hydrajax.errors import HydrajaxError
from hydrajax.families.family import to_llama_config
from hydrajax.models.layout import base_layout, leaf, read, shapes
from hydrajax.models.llama import Llama, abstract_base
from hydrajax.models.weights import quantize

WHAT = "--base"
# Rotary buffers, which old transformers versions saved and which follow from the config; and the heads that a Medusa-2
# checkpoint has beside its base (`hydrajax.checkpoints.heads.released`).
IGNORED = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|medusa_head\..*"
INT8 = ("qkv", "out", "gate_up", "down", "lm_head")  # the weights of matmuls, `Llama` with int8
Progress = Callable[[int, int], None]  # told how many numbers of how many have been loaded


def load_llama(
    directory: str | Path,
    dtype=jnp.float32,
    place: Callable | None = None,
    *,
    int8: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> tuple[Llama, dict]:
    """The model and its parameters, cast to ``dtype`` and placed on the device one by one.

    place: ``place(array, logical_axes)`` puts one host array on devices (default: the default device).
    int8: quantise the weights of matmuls, one by one as they are read.

    Host memory holds one parameter at a time beside the device copy (three matrices where ours fuses them), and the
    pages of one file. Raises `HydrajaxError` for a missing, truncated or foreign file.
    """
    directory = Path(directory)
    check_directory(directory, WHAT)
    config_file = directory / "config.json"
    config = to_llama_config(read_json(config_file, WHAT), f"{WHAT}: {config_file}")
    model = Llama(config, jnp.dtype(dtype), int8)
    files = open_model(directory, WHAT)
    if config.n_layers > len(files):  # or a slip in a number would have us list millions of names
        raise HydrajaxError(f"{WHAT}: {directory} has {len(files)} tensors, too few for {config.n_layers} layers")

    layout = base_layout(config)
    # A tied model's file may still hold the copy.
    ignored = IGNORED + r"|lm_head\.weight" * config.tied_lm_head
    expect_tensors(files, shapes(layout), f"{WHAT}: {directory}", re.compile(ignored))

    axes = nn.get_partition_spec(abstract_base(model))
    place = place or (lambda array, _: jax.device_put(array))
    done, total = 0, sum(math.prod(shape) for shape in shapes(layout).values())

    def put(path, array):
        nonlocal done
        *parents, name = path
        parts = {name: array}
        if int8 and name in INT8:
            parts[name], parts[f"{name}_scale"] = quantize(array)
        else:
            parts[name] = np.asarray(array, dtype)
        placed = {part: place(x, leaf(axes, (*parents, part))) for part, x in parts.items()}
        done += array.size
        on_progress(done, total)
        return placed

    return model, read(layout, files, put)


def eos_ids(directory: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids: from ``generation_config.json`` if it names any, else from ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        if path.exists():
            found = read_json(path, WHAT).get("eos_token_id")
            if found is None:
                continue
            ids = tuple(found) if isinstance(found, list) else (found,)
            if not all(type(token) is int for token in ids):
                raise HydrajaxError(f"{name}: eos_token_id is {found!r}, supported is an integer or a list of them")
            return ids
    return ()
