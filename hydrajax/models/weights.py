"""Weights: how a module declares them, and how they are multiplied with.

A weight is an array, or `Quantized`: numbers of fewer bits, such as `Int8`; or `LowRank`, one of these two with an
adapter beside it. Every matmul with one goes through `project`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.adapter import KERNELS, Adapter
from hydrajax.models.arrays import Array

ROWS = 256  # of a kernel that are quantised at once


class Quantized(abc.ABC):
    """A kernel ``[D, *features]`` whose numbers have few bits (weights only; the activations stay as they are).

    A subclass is a dataclass of arrays, registered as a pytree. Each field is a parameter of its own (`stored`), so a
    kernel is sharded, loaded and counted by its arrays.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The kernel's, ``(D, *features)``."""

    @classmethod
    @abc.abstractmethod
    def declare(cls, module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Quantized:
        """Declare the parameters of a kernel of this shape and these logical axes. Their first values mean nothing."""

    @classmethod
    @abc.abstractmethod
    def of(cls, kernel: np.ndarray) -> Quantized:
        """Quantise a kernel, on the host. Raises `HydrajaxError` for numbers that are not finite."""

    @abc.abstractmethod
    def dequantized(self) -> Float[Array, " D *features"]:
        """Return the float32 kernel that it stands for."""

    @abc.abstractmethod
    def project(self, x: Float[Array, "*rows D"], dtype) -> Float[Array, "*rows F"]:
        """Return ``x @ kernel`` in this dtype, as `project` does."""

    def stored(self, name: str) -> dict[str, Array]:
        """Return the arrays by the names of their parameters: the first field's is the kernel's own."""
        first, *others = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, first)} | {f"{name}_{other}": getattr(self, other) for other in others}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Quantized):
    """``values * scale``, symmetric around zero, one byte per number and a scale per output feature.

    values: int8 ``[D, *features]``. scale: float32 ``[*features]``.
    """

    values: Array
    scale: Float[Array, "*features"]

    @property
    def shape(self):
        return self.values.shape

    @classmethod
    def declare(cls, module, name, shape, axes):
        zeros = nn.with_logical_partitioning(lambda rng, shape: jnp.zeros(shape, jnp.int8), axes)
        ones = nn.with_logical_partitioning(lambda rng, shape: jnp.ones(shape, jnp.float32), axes[1:])
        return cls(module.param(name, zeros, shape), module.param(f"{name}_scale", ones, shape[1:]))

    @classmethod
    def of(cls, kernel):
        """Return the nearest kernel, each output feature's largest weight being 127."""
        # Row by row in blocks: several float32 copies of an lm head at once would be the peak of the host's memory.
        blocks = [slice(i, i + ROWS) for i in range(0, len(kernel), ROWS)]
        largest = np.zeros(kernel.shape[1:], np.float32)
        for rows in blocks:
            np.maximum(largest, np.max(np.abs(kernel[rows].astype(np.float32)), axis=0), out=largest)
        if not np.all(np.isfinite(largest)):
            raise HydrajaxError("quantize: a weight is not a finite number")
        scale = largest / np.float32(127)
        scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # of a feature of zeros, or nearly
        values = np.empty(kernel.shape, np.int8)
        for rows in blocks:
            values[rows] = np.rint(kernel[rows].astype(np.float32) / scale)
        return cls(values, scale)

    def dequantized(self):
        return self.values.astype(jnp.float32) * self.scale

    def project(self, x, dtype):
        values = self.values.reshape(x.shape[-1], -1).astype(x.dtype)
        product = backend.matmul(x, values, jnp.float32, stored=False)
        return (product * self.scale.reshape(-1)).astype(dtype)


QUANTIZED: dict[str, type[Quantized]] = {"int8": Int8}  # by the name that a user gives


class LowRank(NamedTuple):
    """A frozen kernel ``W [D, *features]`` and what an adapter adds to it, ``scale * A B`` for each adapted part.

    kernel: W. a: ``[D, P, r]``, of the P adapted parts side by side, so that one product serves them all. b: for each
    part of the kernel (`hydrajax.models.adapter.KERNELS`) ``[r, *its features]``, None where it has no adapter.
    rng, dropout: drop numbers of the input on their way to A, in training; None does not.
    """

    kernel: Array | Quantized
    a: Float[Array, "D P r"]
    b: tuple[Array | None, ...]
    scale: float
    dropout: float = 0.0
    rng: Array | None = None

    def delta(self) -> Float[Array, " D *features"]:
        """What is added to the kernel, as one array (of NumPy's if ``a`` is)."""
        xp, rank = self.a.__array_namespace__(), self.a.shape[-1]
        inputs = iter(xp.moveaxis(self.a, 1, 0))
        products = [None if b is None else (next(inputs) @ b.reshape(rank, -1)) * self.scale for b in self.b]
        return self._joined(products, xp)

    def _joined(self, products: list, xp):
        """Products ``[*rows, F]`` with the parts, None where there is none, as ``[*rows, *features]``."""
        features = self.kernel.shape[1:]
        rows, dtype = next((x.shape[:-1], x.dtype) for x in products if x is not None)
        if len(products) == 1:
            return products[0].reshape(*rows, *features)
        sizes = part_sizes(features[-2], len(products))
        shapes = [(*rows, *features[:-2], size, features[-1]) for size in sizes]
        parts = [
            xp.zeros(shape, dtype=dtype) if x is None else x.reshape(shape)
            for x, shape in zip(products, shapes, strict=True)
        ]
        return xp.concat(parts, axis=-2)


def low_rank(name: str, kernel: Array | Quantized, beside: dict, adapter: Adapter) -> LowRank:
    """The kernel called ``name`` with the adapter's parameters that lie beside it in a nested dict."""
    b = tuple(beside.get(f"{name}_lora_b_{part}") for part in KERNELS[name])
    return LowRank(kernel, beside[f"{name}_lora_a"], b, adapter.scale)


def part_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The features of each linear layer in our kernel of this name and shape, as its B has them."""
    features, parts = shape[1:], KERNELS[name]
    if len(parts) == 1:
        return {parts[0]: features}
    sizes = part_sizes(features[-2], len(parts))
    return {part: (*features[:-2], size, features[-1]) for part, size in zip(parts, sizes, strict=True)}


def part_sizes(places: int, n_parts: int) -> tuple[int, ...]:
    """How many places of a fused kernel's last axis but one each of its parts has."""
    return (places - n_parts + 1, *[1] * (n_parts - 1))


def project(x: Float[Array, "*rows D"], kernel: Array | Quantized | LowRank, dtype=None) -> Float[Array, "*rows F"]:
    """``x @ kernel``, the kernel's axes after the first taken as one, F.

    dtype: of the result and of the accumulation, default ``x.dtype``.
    """
    dtype = dtype or x.dtype
    if isinstance(kernel, LowRank):
        return project(x, kernel.kernel, dtype) + _added(x, kernel, dtype)
    if isinstance(kernel, Quantized):
        return kernel.project(x, dtype)
    return backend.matmul(x, kernel.reshape(x.shape[-1], -1), dtype)


def _added(x: Float[Array, "*rows D"], kernel: LowRank, dtype) -> Float[Array, "*rows F"]:
    """What the adapter adds to ``x @ W``."""
    if kernel.rng is not None:
        keep = jax.random.bernoulli(kernel.rng, 1 - kernel.dropout, x.shape)
        x = jnp.where(keep, x / (1 - kernel.dropout), 0).astype(x.dtype)
    n_parts, rank = kernel.a.shape[1:]
    inner = project(x, kernel.a).reshape(*x.shape[:-1], n_parts, rank)
    inputs = iter([inner[..., i, :] for i in range(n_parts)])
    products = [None if b is None else project(next(inputs), b, dtype) * kernel.scale for b in kernel.b]
    return kernel._joined(products, jnp).reshape(*x.shape[:-1], -1)


def declare(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init) -> Array:
    """A parameter with its shape, logical axes (`hydrajax.sharding`) and initialiser in one place."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, module.dtype)


def declare_kernel(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> Array | Quantized | LowRank:
    """A matmul's weight, contracted over its first axis: normal with std 0.02, or the class of `QUANTIZED` whose name
    is ``module.quantize``.

    Where ``module.adapter`` changes the weight it is `LowRank`, which changes nothing as it is initialised.
    """
    if module.quantize is None:
        kernel = declare(module, name, shape, axes, nn.initializers.normal(0.02))
    else:
        kernel = QUANTIZED[module.quantize].declare(module, name, shape, axes)
    adapter: Adapter | None = module.adapter
    if adapter is None or not adapter.of(name):
        return kernel
    return _declare_low_rank(module, name, kernel, axes, adapter)


def _declare_low_rank(module: nn.Module, name: str, kernel: Array | Quantized, axes, adapter: Adapter) -> LowRank:
    """The adapter's weights: A as in PEFT, uniform up to 1 / sqrt(D) (kaiming with a = sqrt(5)), B zero."""
    shape, targets = kernel.shape, adapter.of(name)
    limit = 1 / math.sqrt(shape[0])

    def uniform(rng, shape, dtype):
        return jax.random.uniform(rng, shape, dtype, -limit, limit)

    a = declare(module, f"{name}_lora_a", (shape[0], len(targets), adapter.rank), (axes[0], None, None), uniform)
    beside = {f"{name}_lora_a": a}
    for part, features in part_shapes(name, shape).items():
        if part in targets:
            b = f"{name}_lora_b_{part}"
            beside[b] = declare(module, b, (adapter.rank, *features), (None, *axes[1:]), nn.initializers.zeros)
    rng = module.make_rng("dropout") if adapter.dropout and module.has_rng("dropout") else None
    return low_rank(name, kernel, beside, adapter)._replace(dropout=adapter.dropout, rng=rng)
