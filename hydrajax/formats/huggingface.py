"""Read a base in a Hugging Face directory: ``config.json`` and weights.

Weights are read from safetensors or PyTorch files, which must hold exactly the model's tensors, in the right shapes.
Quantised files are widened (`hydrajax.lowbit.files`). `hydrajax.formats.export_base` writes such directories.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.formats.checkpoint import WHAT, Checkpoint
from hydrajax.models.adapter import MARK as ADAPTER_MARK
from hydrajax.models.adapter import low_rank, with_adapter
from hydrajax.models.init import abstract_base
from hydrajax.models.layout import Entry, Parameter, Stack, leaf, read, shapes
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import AS_STORED, Quantized
from hydrajax.ops import trace

Progress = Callable[[int, int], None]  # called with the numbers of parameters loaded and in total


def read_config(directory: str | Path, what: str = WHAT) -> LlamaConfig:
    """Read the configuration of the base in a directory; ``what`` begins error messages."""
    return Checkpoint(directory, what).config


def default_dtype(stored: str) -> jnp.dtype:
    """Return the default compute dtype for weights stored in ``stored`` (NumPy's name).

    float32 on a CPU: bfloat16 decodes faster there, but its text can differ. Accelerators are limited by the bytes read
    per step: bfloat16 for 16-bit weights, as float16 rounds off 3 of 11 significant bits, else float32. GPUs without
    bfloat16, such as a T4, get float16 instead.
    """
    halved = stored in ("bfloat16", "float16") and trace.platform().name != "cpu"
    sixteen_bits = jnp.float16 if trace.on_turing() else jnp.bfloat16
    return jnp.dtype(sixteen_bits if halved else jnp.float32)


def load_llama(
    base: Checkpoint | str | Path,
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
            layers that a file has in 4 bits keep its numbers with every name of 4 bits. "auto":
            `Checkpoint.weight_type`.
        adapter: directory of an adapter (`hydrajax.formats.peft`), whose low-rank weights stay separate, in ``dtype``.
        merge: add the adapter to the base's weights instead, in float32, before anything is rounded or quantised.
        what: begins error messages.

    Raises:
        HydrajaxError: a missing, damaged or foreign file.
    """
    base = Checkpoint.of(base, what)
    base.check_directory()
    base.check_tensors()
    lora = None if adapter is None else base.adapter(adapter)
    dtype = default_dtype(base.dtype) if dtype is None else jnp.dtype(dtype)
    if quantize == AS_STORED:
        quantize = None if lora and merge else base.weight_type
    model = Llama(base.config, dtype, quantize, lora.adapter if lora and not merge else None)
    place = place or (lambda array, _: jax.device_put(np.asarray(array)))
    reading = _Reading(base, model, place, on_progress, lora if merge else None)
    params = reading.params()
    if lora and not merge:
        added = jax.tree.map_with_path(
            lambda path, x: place(np.asarray(x, dtype), leaf(reading.axes, tuple(key.key for key in path))), lora.params
        )
        params = with_adapter(params, added)
    return model, params


class _Reading:
    """The reading of a model's parameters, one by one."""

    def __init__(self, base: Checkpoint, model: Llama, place: Callable, on_progress: Progress, lora: Any | None):
        """``lora`` is an adapter to merge into the weights."""
        self.base, self.model, self.place, self.lora = base, model, place, lora
        boxed = abstract_base(model)
        self.expected, self.axes = nn.unbox(boxed), nn.get_partition_spec(boxed)
        self.on_progress, self.done = on_progress, 0
        self.total = sum(math.prod(shape) for shape in shapes(base.layout).values())
        self.unlike: list[Entry] = []

    def params(self) -> dict:
        """Read all parameters."""
        # The largest first: their copies on the host are then no peak in addition to nearly the whole model.
        largest_first = sorted(self.base.layout, key=lambda entry: -sum(map(math.prod, entry.theirs.values())))
        keeps = self.model.quantize and not self.lora
        params = read(largest_first, self.base.files, self.convert, *[self.take] * bool(keeps))
        if self.unlike:
            more = f" and in {len(self.unlike) - 1} more kernels" if self.unlike[1:] else ""
            warnings.warn(
                f"hydrajax: {self.base.what}: {self.base.directory}: g_idx differs in "
                f"{', '.join(self.unlike[0].theirs)}{more}, whose products share x: they are widened and rounded to "
                f"{self.model.quantize}",
                stacklevel=3,
            )
        return params

    def take(self, entry: Entry):
        """Return a kernel of the file's own numbers, None if it has none."""
        path = entry.ours[0]
        wanted = leaf(self.expected, path)
        files = self.base.files
        takes = isinstance(wanted, Quantized) and len(entry.ours) == 1 and ("experts" in path) == files.of_experts
        kernel = files.kernel(type(wanted), entry, self.unlike) if takes else None
        return kernel and self.put(path, kernel, sum(map(math.prod, entry.theirs.values())))

    def convert(self, path, parameter):
        """Return a parameter in the model's type."""
        parameter, wanted = self.merged(path, parameter), leaf(self.expected, path)
        if not isinstance(wanted, Quantized):
            weight = parameter.astype(wanted.dtype)
        elif isinstance(parameter, Stack):
            weight = _quantised_each(type(wanted), parameter)
        else:
            weight = type(wanted).of(
                dataclasses.replace(parameter, order=(1, 0)) if path[-1] == "embedding" else parameter
            )
        return self.put(path, weight, parameter.size)

    def merged(self, path, parameter):
        """Return a parameter with the adapter's low-rank product added, if it has one."""
        *parents, name = path
        added = None if self.lora is None else self.lora.params.get(parents[0]) if parents else self.lora.params
        if added is None or f"{name}{ADAPTER_MARK}a" not in added:
            return parameter
        array = np.asarray(parameter)
        return Parameter((array.astype(np.float32) + low_rank(name, array, added, self.lora.adapter).delta(),))

    def put(self, path, weight, size: int):
        """Place a weight on the devices."""
        names = leaf(self.axes, path)
        if isinstance(weight, Quantized):
            names = names.arrays()  # without the order of inputs, which only files have
            arrays = {part: self.place(x, names.get(part, (None,))) for part, x in weight.arrays().items()}
            found = dataclasses.replace(weight, **arrays)
        else:
            found = self.place(weight, names)
        jax.block_until_ready(found)
        jax.device_put(0)  # JAX frees copies of the host's arrays not before its next call
        self.done += size
        self.on_progress(self.done, self.total)
        return found


def _quantised_each(kind: type[Quantized], stack: Stack) -> Quantized:
    """Quantise the kernels of experts one by one, into arrays with a leading axis for experts."""
    found: dict[str, np.ndarray] = {}
    for i, parameter in enumerate(stack.parts):
        kernel = kind.of(parameter)
        for name, array in kernel.arrays().items():
            found.setdefault(name, np.empty((len(stack.parts), *array.shape), array.dtype))[i] = array
    return dataclasses.replace(kernel, **found)
