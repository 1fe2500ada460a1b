"""The base from a Hugging Face directory, and back into one: ``config.json`` and the weights.

Weights are read from safetensors or PyTorch files and written as safetensors. Every tensor of the files must be known,
and every tensor of the model must be there with the right shape.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.family_registry import base_layout, from_llama_config, to_llama_config
from hydrajax.files import check_directory
from hydrajax.formats.directories import WHAT as EXPORT
from hydrajax.formats.directories import cast, exported
from hydrajax.formats.peft import load_adapter
from hydrajax.formats.tensors import (
    TensorFiles,
    expect_tensors,
    open_tensors,
    read_json,
    save_safetensors,
)
from hydrajax.models import backend
from hydrajax.models.adapter import MARK as ADAPTER_MARK
from hydrajax.models.adapter import with_adapter
from hydrajax.models.base_model import abstract_base
from hydrajax.models.layout import MODEL, Layout, leaf, read, shapes, write
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import QUANTIZED, low_rank
from hydrajax.text.tokenizer import load_tokenizer

WHAT = "base"
# Rotary buffers, which old transformers versions saved and which follow from the config; and the heads that a Medusa-2
# checkpoint has beside its base (`hydrajax.formats.medusa_format`).
IGNORED = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|medusa_head\..*"
MERGED = "hydrajax_adapter"  # in config.json: the sha256 of the adapter that the weights hold
KERNELS = ("qkv", "out", "gate_up", "down", "lm_head")  # the weights of matmuls, which `Llama.quantize` is about
Progress = Callable[[int, int], None]  # told how many numbers of how many have been loaded


def read_config(directory: str | Path, what: str = WHAT) -> LlamaConfig:
    """The configuration of the base in a Hugging Face directory; ``what`` begins the messages of errors."""
    file = Path(directory) / "config.json"
    return to_llama_config(read_json(file, what), f"{what}: {file}")


def default_dtype(stored: str) -> jnp.dtype:
    """The dtype to compute in where none is named, for weights stored in ``stored`` (NumPy's name).

    float32 on a CPU, where products in bfloat16 are 3 to 12 times slower. On an accelerator memory and the bytes that a
    step reads count: the weights' own, bfloat16 or float32. float16 becomes bfloat16, of the same size, as nothing here
    computes in float16: it rounds off 3 of 11 significant bits. float64 becomes float32.
    """
    halved = stored in ("bfloat16", "float16") and backend.platform().name != "cpu"
    return jnp.dtype(jnp.bfloat16 if halved else jnp.float32)


def stored_dtype(directory: str | Path, what: str = WHAT) -> str:
    """NumPy's name of the dtype in which most of a base's numbers are stored."""
    directory = Path(directory)
    return _most(open_tensors(directory, MODEL, what), base_layout(read_config(directory, what)))


def _most(files: TensorFiles, layout: Layout) -> str:
    stored: Counter = Counter()
    for name, shape in shapes(layout).items():
        stored[files.dtype(name)] += math.prod(shape)
    return max(stored, key=stored.get)


def load_llama(
    directory: str | Path,
    dtype=jnp.float32,
    place: Callable | None = None,
    *,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    merge: bool = False,
    on_progress: Progress = lambda done, total: None,
    what: str = WHAT,
) -> tuple[Llama, dict]:
    """The model and its parameters, cast to ``dtype`` and placed on the device one by one.

    dtype: None is `default_dtype` of what most of the model's numbers are stored in.
    place: ``place(array, logical_axes)`` puts one host array on devices; by default on the default device.
    quantize: quantise the weights of matmuls, one by one as they are read, by a name of
        `hydrajax.models.weights.QUANTIZED`.
    adapter: a directory of PEFT's (`hydrajax.formats.peft`): its weights then lie beside the base's, in
        ``dtype``. With ``merge`` they are added to them in float32, before anything is rounded or quantised.
    on_progress: told how many numbers of how many have been loaded, after each parameter.
    what: begins the messages of errors.

    Host memory holds one parameter at a time beside the device copy (three matrices where ours fuses them), and the
    pages of one file. Raises `HydrajaxError` for a missing, truncated or foreign file.
    """
    directory = Path(directory)
    check_directory(directory, what)
    config = read_config(directory, what)
    files = open_tensors(directory, MODEL, what)
    if config.n_layers > len(files):  # or a slip in a number would have us list millions of names
        raise HydrajaxError(f"{what}: {directory} has {len(files)} tensors, too few for {config.n_layers} layers")

    stored_adapter = None if adapter is None else load_adapter(adapter, config)
    layout = base_layout(config)
    # A tied model's file may still hold the copy.
    ignored = IGNORED + r"|lm_head\.weight" * config.tied_lm_head
    expect_tensors(files, shapes(layout), f"{what}: {directory}", re.compile(ignored))

    stored = _most(files, layout)
    dtype = default_dtype(stored) if dtype is None else jnp.dtype(dtype)
    beside = stored_adapter and not merge
    model = Llama(config, dtype, quantize, stored_adapter.adapter if beside else None)
    axes = nn.get_partition_spec(abstract_base(model))
    place = place or (lambda array, _: jax.device_put(array))
    done, total = 0, sum(math.prod(shape) for shape in shapes(layout).values())

    def merged(array, parents, name):
        added = stored_adapter.params.get(parents[0]) if parents else stored_adapter.params
        if added is None or f"{name}{ADAPTER_MARK}a" not in added:
            return array
        return array.astype(np.float32) + low_rank(name, array, added, stored_adapter.adapter).delta()

    def put(path, array):
        nonlocal done
        *parents, name = path
        if stored_adapter and merge:
            array = merged(array, tuple(parents), name)
        parts = {name: array}
        if quantize and name in KERNELS:
            parts = QUANTIZED[quantize].of(array).stored(name)
        else:
            parts[name] = np.asarray(array, dtype)
        placed = {part: place(x, leaf(axes, (*parents, part))) for part, x in parts.items()}
        done += array.size
        on_progress(done, total)
        return placed

    params = read(layout, files, put)
    if beside:
        kept = jax.tree.map_with_path(
            lambda path, x: place(np.asarray(x, dtype), leaf(axes, tuple(key.key for key in path))),
            stored_adapter.params,
        )
        params = with_adapter(params, kept)
    return model, params


def eos_ids(directory: str | Path) -> tuple[int, ...]:
    """The ids that end generation: from ``generation_config.json`` if it names any, else from ``config.json``."""
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


def export_llama(
    directory: str | Path,
    model: Llama,
    params: Any,
    *,
    tokenizer=None,
    dtype=jnp.bfloat16,
    eos_ids: tuple[int, ...] = (),
    extra: dict | None = None,
    overwrite: bool = False,
) -> None:
    """Save a base as ``config.json`` and ``model.safetensors`` in the layout of transformers.

    It is the inverse of `load_llama`, bit for bit. The host holds the whole model once.

    dtype: of the file; None keeps each parameter's own.
    tokenizer: anything with transformers' ``save_pretrained``.
    eos_ids: the ids that end generation, for ``config.json``.
    extra: more fields for ``config.json``.
    overwrite: replace a directory even if it is no earlier export, with all that is in it.

    Raises `HydrajaxError` for a quantised base or one with an adapter, and if the directory may not be replaced or
    cannot be written.
    """
    if model.quantize:
        raise HydrajaxError(f"{EXPORT}: the base is quantised to {model.quantize}, supported are float weights")
    if model.adapter:
        raise HydrajaxError(f"{EXPORT}: the base has an adapter beside it; merge it first")
    with exported(directory, overwrite) as (folder, config):
        tensors = cast(write(base_layout(model.config), params), dtype)
        save_safetensors(folder / f"{MODEL}.safetensors", tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        eos = (eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)) if eos_ids else None
        config |= from_llama_config(model.config, EXPORT) | {
            "torch_dtype": tensors["model.norm.weight"].dtype.name,
            "bos_token_id": getattr(tokenizer, "bos_token_id", None),
            "eos_token_id": eos,  # null too: transformers' default is id 2
        }
        config |= extra or {}


def export_merged(
    directory: str | Path, base: str | Path, adapter: str | Path, *, dtype=None, overwrite: bool = False
) -> None:
    """Save a base with an adapter added to its weights: a model that needs no adapter, for transformers and ``--base``.

    dtype: of the file; None keeps what most of the base's numbers are stored in. What the adapter adds is added in
    float32 and then rounded to it. For the rest see `export_llama`.
    """
    base = Path(base)
    # On the host: nothing is computed with it.
    model, params = load_llama(base, dtype or stored_dtype(base), lambda array, _: array, adapter=adapter, merge=True)
    extra = {MERGED: load_adapter(adapter, model.config).sha256}
    export_llama(
        directory, model, params, tokenizer=load_tokenizer(base), dtype=model.dtype, eos_ids=eos_ids(base),
        extra=extra, overwrite=overwrite,
    )  # fmt: skip
