"""Read and write a base in a Hugging Face directory: ``config.json`` and weights.

Weights are read from safetensors or PyTorch files and written as safetensors. The files must hold exactly the model's
tensors, in the right shapes. Quantised files are widened (`hydrajax.lowbit.files`).
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.expert_layout import BIAS, has_fused_experts
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config, to_llama_config
from hydrajax.files import check_directory
from hydrajax.formats.directories import WHAT as EXPORT
from hydrajax.formats.directories import cast, exported
from hydrajax.formats.peft import load_adapter
from hydrajax.formats.tensors import (
    TensorFiles,
    check_method,
    expect_tensors,
    open_base_tensors,
    read_json,
    save_safetensors,
)
from hydrajax.models.adapter import MARK as ADAPTER_MARK
from hydrajax.models.adapter import with_adapter
from hydrajax.models.base_model import abstract_base
from hydrajax.models.layout import MODEL, Entry, Layout, Parameter, Stack, leaf, read, shapes, write
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import AS_STORED, Quantized, low_rank
from hydrajax.ops import trace
from hydrajax.text.tokenizer import load_tokenizer

WHAT = "base"
# Rotary buffers of old transformers versions, a Medusa-2 model's heads (`hydrajax.formats.medusa_format`), and MTP
# modules (`hydrajax.formats.mtp_format`, see also `_modules_after`).
IGNORED = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|medusa_head\..*|model\.mtp_layers\..*|mtp\..*"
MODULES, MOST_MODULES = "num_nextn_predict_layers", 64
MERGED = "hydrajax_adapter"  # in config.json: the sha256 of the adapter that was merged into the weights
Progress = Callable[[int, int], None]  # called with the numbers of parameters loaded and in total


def read_config(directory: str | Path, what: str = WHAT) -> LlamaConfig:
    """Read the configuration of the base in a directory; ``what`` begins error messages."""
    file = Path(directory) / "config.json"
    raw, where = read_json(file, what), f"{what}: {file}"
    config = to_llama_config(raw, where)
    check_method(raw, where)
    return config


def _modules_after(directory: Path, n_layers: int, what: str) -> list[str]:
    """Return regular expressions of the tensors of MTP modules that are stored as layers after the last."""
    file = directory / "config.json"
    number = read_json(file, what).get(MODULES) or 0
    if type(number) is not int or not 0 <= number <= MOST_MODULES:
        raise HydrajaxError(f"{what}: {file}: {MODULES}: got {number!r}, expected an integer from 0 to {MOST_MODULES}")
    return [rf"model\.layers\.{n_layers + i}\..*" for i in range(number)]


def default_dtype(stored: str) -> jnp.dtype:
    """Return the default compute dtype for weights stored in ``stored`` (NumPy's name).

    float32 on a CPU: bfloat16 decodes faster there, but its text can differ. Accelerators are limited by the bytes read
    per step: bfloat16 for 16-bit weights, as float16 rounds off 3 of 11 significant bits, else float32. GPUs without
    bfloat16, such as a T4, get float16 instead.
    """
    halved = stored in ("bfloat16", "float16") and trace.platform().name != "cpu"
    sixteen_bits = jnp.float16 if trace.on_turing() else jnp.bfloat16
    return jnp.dtype(sixteen_bits if halved else jnp.float32)


def stored_dtype(directory: str | Path, what: str = WHAT) -> str:
    """Return NumPy's name of the dtype in which most of a base's parameters are stored."""
    directory = Path(directory)
    files = open_base_tensors(directory, what)
    return _main_dtype(files, _layout_of(read_config(directory, what), files))


def stored_quantize(files: TensorFiles, what: str = WHAT) -> str | None:
    """Return the type that keeps the weights of a base published in 4-bit integers, on a CPU with kernels for it."""
    if not trace.on_cpu() or 4 not in files.integer_bits:
        return None
    if trace.has_few_bits():
        return "int4"
    reason = "on several devices" if jax.device_count() > 1 else "as the CPU kernels were not built"
    warnings.warn(f"hydrajax: {what}: its 4-bit weights are widened, {reason}; decoding is slower", stacklevel=2)
    return None


def _layout_of(config: LlamaConfig, files: TensorFiles) -> Layout:
    """Return the key map of a base with these files."""
    return base_layout(config, has_fused_experts(config, files))


def _main_dtype(files: TensorFiles, layout: Layout) -> str:
    stored: Counter = Counter()
    for name, shape in shapes(layout).items():
        if name in files:  # reading refuses a base without it
            stored[files.dtype(name)] += math.prod(shape)
    return max(stored, key=stored.get, default="float32")


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
    """Load the model and its parameters, placed on devices one by one.

    Host memory holds at most one parameter at a time, twice where it is converted. If ``place`` cuts the parameter into
    slices (`hydrajax.sharding.placer`), it holds two slices, and of safetensors files no more than the slices is
    copied. Tensors of PyTorch, GGUF and quantised files are read whole and cut. Parameters that are quantised or merged
    with an adapter are read whole too, as their scales and sums are those of whole matrices.

    Args:
        dtype: of parameters and computation; None for `default_dtype` of the stored weights.
        place: ``place(array, logical_axes)`` returns the array on devices. ``array`` is a `Parameter` or an array of
            NumPy: ``array[index]`` reads a slice and ``np.asarray(array)`` all. By default the default device's.
        quantize: a weight type (`hydrajax.plugins`); quantises the weights of matrix products. On a CPU
            layers that a file has in 4 bits keep its numbers with every name of 4 bits. "auto": `stored_quantize`.
        adapter: directory of an adapter (`hydrajax.formats.peft`), whose low-rank weights stay separate, in ``dtype``.
        merge: add the adapter to the base's weights instead, in float32, before anything is rounded or quantised.
        on_progress: called after each parameter.
        what: begins error messages.

    Raises:
        HydrajaxError: a missing, damaged or foreign file.
    """
    directory = Path(directory)
    check_directory(directory, what)
    config = read_config(directory, what)
    files = open_base_tensors(directory, what)
    if config.n_layers > len(files):  # before a typo makes us list millions of names
        raise HydrajaxError(f"{what}: {directory} has {len(files)} tensors, too few for {config.n_layers} layers")

    lora = None if adapter is None else load_adapter(adapter, config)
    layout = _layout_of(config, files)
    ignored = IGNORED + r"|lm_head\.weight" * config.tied_lm_head  # some files of tied models have a copy
    ignored = "|".join([ignored, *_modules_after(directory, config.n_layers, what)])
    ignored = "|".join([ignored, *map(re.escape, files.zero_biases(shapes(layout)))])
    expect_tensors(files, shapes(layout), f"{what}: {directory}", ignored)

    dtype = default_dtype(_main_dtype(files, layout)) if dtype is None else jnp.dtype(dtype)
    if quantize == AS_STORED:
        quantize = None if lora and merge else stored_quantize(files, what)
    model = Llama(config, dtype, quantize, lora.adapter if lora and not merge else None)
    expected = abstract_base(model)
    expected, axes = nn.unbox(expected), nn.get_partition_spec(expected)
    place = place or (lambda array, _: jax.device_put(np.asarray(array)))
    done, total = 0, sum(math.prod(shape) for shape in shapes(layout).values())

    def merged(parameter, parents, name) -> Parameter:
        added = lora.params.get(parents[0]) if parents else lora.params
        if added is None or f"{name}{ADAPTER_MARK}a" not in added:
            return parameter
        array = np.asarray(parameter)
        return Parameter((array.astype(np.float32) + low_rank(name, array, added, lora.adapter).delta(),))

    def placed(path, weight, size):
        nonlocal done
        names = leaf(axes, path)
        if isinstance(weight, Quantized):
            names = names.arrays()  # without the order of inputs, which only files have
            arrays = {part: place(x, names.get(part, (None,))) for part, x in weight.arrays().items()}
            found = dataclasses.replace(weight, **arrays)
        else:
            found = place(weight, names)
        jax.block_until_ready(found)
        jax.device_put(0)  # JAX frees copies of the host's arrays not before its next call
        done += size
        on_progress(done, total)
        return found

    def take(entry):
        """Return a kernel of the file's own numbers."""
        path = entry.ours[0]
        wanted = leaf(expected, path)
        takes = isinstance(wanted, Quantized) and "experts" not in path
        kernel = files.kernel(type(wanted), entry, unlike) if takes else None
        return kernel and placed(path, kernel, math.prod(kernel.shape))

    def put(path, parameter):
        *parents, name = path
        if lora and merge:
            parameter = merged(parameter, tuple(parents), name)
        wanted = leaf(expected, path)
        if not isinstance(wanted, Quantized):
            weight = parameter.astype(wanted.dtype)
        elif isinstance(parameter, Stack):
            weight = _quantised_each(type(wanted), parameter)
        else:
            kernel = dataclasses.replace(parameter, order=(1, 0)) if name == "embedding" else parameter
            weight = type(wanted).of(kernel)
        return placed(path, weight, parameter.size)

    keeps = quantize and not (lora and merge)
    # The largest first: their copies on the host are then no peak in addition to nearly the whole model.
    largest_first = sorted(layout, key=lambda entry: -sum(map(math.prod, entry.theirs.values())))
    unlike: list[Entry] = []
    params = read(largest_first, files, put, *[take] * bool(keeps))
    if unlike:
        names, more = ", ".join(unlike[0].theirs), f" and in {len(unlike) - 1} more kernels" if unlike[1:] else ""
        warnings.warn(
            f"hydrajax: {what}: {directory}: g_idx differs in {names}{more}, whose products share x: they are widened "
            f"and rounded to {quantize}",
            stacklevel=2,
        )
    if lora and not merge:
        added = jax.tree.map_with_path(
            lambda path, x: place(np.asarray(x, dtype), leaf(axes, tuple(key.key for key in path))), lora.params
        )
        params = with_adapter(params, added)
    return model, params


def _quantised_each(kind: type[Quantized], stack: Stack) -> Quantized:
    """Quantise the kernels of experts one by one, into arrays with a leading axis for experts."""
    found: dict[str, np.ndarray] = {}
    for i, parameter in enumerate(stack.parts):
        kernel = kind.of(parameter)
        for name, array in kernel.arrays().items():
            found.setdefault(name, np.empty((len(stack.parts), *array.shape), array.dtype))[i] = array
    return dataclasses.replace(kernel, **found)


def eos_ids(directory: str | Path) -> tuple[int, ...]:
    """Return the ids that end generation, of ``generation_config.json`` or else of ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        found = read_json(path, WHAT).get("eos_token_id") if path.exists() else None
        if found is not None:
            ids = tuple(found) if isinstance(found, list) else (found,)
            if not all(type(token) is int for token in ids):
                raise HydrajaxError(f"{name}: eos_token_id: got {found!r}, expected an integer or a list of integers")
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
    """Save a base in transformers' format: the inverse of `load_llama`, bit for bit. Replaces an earlier export.

    Args:
        tokenizer: anything with transformers' ``save_pretrained``.
        dtype: of the file; None keeps each parameter's own.
        eos_ids: the ids that end generation, for ``config.json``.
        extra: more fields for ``config.json``.
        overwrite: replace a directory with any content.

    Raises:
        HydrajaxError: the base is quantised or has an adapter, or the directory may not be replaced or written.
    """
    if model.quantize:
        raise HydrajaxError(f"{EXPORT}: quantize: got a base in {model.quantize}, expected float weights")
    if model.adapter:
        raise HydrajaxError(f"{EXPORT}: adapter: got a base with an adapter; merge it first")
    with exported(directory, overwrite) as (folder, config):
        tensors = write(base_layout(model.config), params)
        exact = {key: x for key, x in tensors.items() if key.endswith(BIAS)}
        tensors = cast(tensors, dtype) | exact
        save_safetensors(folder / f"{MODEL}.safetensors", tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        eos = (eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)) if eos_ids else None
        config |= from_llama_config(model.config, EXPORT) | {
            "torch_dtype": tensors["model.norm.weight"].dtype.name,
            "bos_token_id": getattr(tokenizer, "bos_token_id", None),
            "eos_token_id": eos,  # written even if null, as transformers' default is id 2
        }
        config |= extra or {}


def export_merged(
    directory: str | Path, base: str | Path, adapter: str | Path, *, dtype=None, overwrite: bool = False
) -> None:
    """Save a base with an adapter merged into its weights, for transformers and ``--base``.

    Args:
        dtype: Of the file, to which the float32 sums are rounded; None for the base's main one. See `export_llama`.
    """
    base = Path(base)
    # Stays on the host, as nothing is computed with it.
    model, params = load_llama(
        base, dtype or stored_dtype(base), lambda array, _: np.asarray(array), adapter=adapter, merge=True
    )
    extra = {MERGED: load_adapter(adapter, model.config).sha256}
    export_llama(
        directory, model, params, tokenizer=load_tokenizer(base), dtype=model.dtype, eos_ids=eos_ids(base),
        extra=extra, overwrite=overwrite,
    )  # fmt: skip
