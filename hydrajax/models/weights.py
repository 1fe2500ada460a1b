"""Weights: declaration in modules, and multiplication.

A weight is an array, a `hydrajax.lowbit.quantized.Quantized` kernel of fewer bits, or `LowRank`, one of these two with
an adapter.
Every product goes through `project`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax import ops
from hydrajax.lowbit.quantized import Quantized
from hydrajax.lowbit.types import quantized_type
from hydrajax.models.adapter import KERNELS, Adapter
from hydrajax.models.arrays import Array, DType
from hydrajax.models.declaring import Declaring, OfEach
from hydrajax.ops import drop


class LowRank(NamedTuple):
    """A frozen kernel ``W [D, *features]`` and an adapter's addition, ``scale * A B`` for each adapted part.

    Attributes:
        kernel: W.
        a: ``[D, P, r]`` for the P adapted parts, so that one product serves them all.
        b: For each part of the kernel (`hydrajax.models.adapter.KERNELS`) ``[r, *its features]``; None without adapter.
        rng, dropout: Drop inputs of A in training; None for no dropout.
    """

    kernel: Array | Quantized
    a: Float[Array, "D P r"]
    b: tuple[Array | None, ...]
    scale: float
    dropout: float = 0.0
    rng: Array | None = None

    def delta(self) -> Float[Array, " D *features"]:
        """Return the addition to the kernel as one array (NumPy if ``a`` is)."""
        xp, rank = self.a.__array_namespace__(), self.a.shape[-1]
        inputs = iter(xp.moveaxis(self.a, 1, 0))
        products = [None if b is None else (next(inputs) @ b.reshape(rank, -1)) * self.scale for b in self.b]
        return self._joined(products, xp)

    def _joined(self, products: list, xp):
        """Return products ``[*rows, F]`` of the parts (None for parts without adapter) joined as ``[*rows,
        *features]``.
        """
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


def low_rank(name: str, kernel: Array | Quantized, parameters: dict, adapter: Adapter) -> LowRank:
    """Return the kernel ``name`` with the adapter's parameters next to it in a nested dict."""
    b = tuple(parameters.get(f"{name}_lora_b_{part}") for part in KERNELS[name])
    return LowRank(kernel, parameters[f"{name}_lora_a"], b, adapter.scale)


def part_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the features of each linear layer in our kernel of this name and shape, as in its B."""
    features, parts = shape[1:], KERNELS[name]
    if len(parts) == 1:
        return {parts[0]: features}
    sizes = part_sizes(features[-2], len(parts))
    return {part: (*features[:-2], size, features[-1]) for part, size in zip(parts, sizes, strict=True)}


def part_sizes(places: int, n_parts: int) -> tuple[int, ...]:
    """Return the sizes of the parts along a fused kernel's second-last axis."""
    return (places - n_parts + 1, *[1] * (n_parts - 1))


def project(
    x: Float[Array, "*rows D"], kernel: Array | Quantized | LowRank, dtype: DType | None = None
) -> Float[Array, "*rows F"]:
    """Return ``x @ kernel``, with the kernel's axes after the first flattened to F.

    Args:
        x: Rows.
        kernel: The weight.
        dtype: Of the result and the accumulation; default ``x.dtype``.
    """
    dtype = dtype or x.dtype
    if isinstance(kernel, LowRank):
        return project(x, kernel.kernel, dtype) + _added(x, kernel, dtype)
    if isinstance(kernel, Quantized):
        return kernel.project(x, dtype)
    return ops.matmul(x, kernel.reshape(x.shape[-1], -1), dtype)


def project_parts(
    x: Float[Array, "*rows D"], kernel: Array | Quantized | LowRank, trained: int | None = None
) -> Float[Array, "*parts *rows F"]:
    """Return ``x @ kernel`` of a fused kernel ``[D, *parts, F]`` with its parts as leading axes; ``trained`` as in
    `hydrajax.ops.matmul_parts`.
    """
    if isinstance(kernel, LowRank):
        added = ops.parts_first(_added(x, kernel, x.dtype), kernel.kernel.shape[1:])
        return project_parts(x, kernel.kernel) + added
    if isinstance(kernel, Quantized):
        return kernel.project_parts(x)
    return ops.matmul_parts(x, kernel, x.dtype, trained=trained)


def _added(x: Float[Array, "*rows D"], kernel: LowRank, dtype) -> Float[Array, "*rows F"]:
    """Return the adapter's addition to ``x @ W``."""
    x = drop(x, kernel.dropout, kernel.rng)
    n_parts, rank = kernel.a.shape[1:]
    inner = project(x, kernel.a).reshape(*x.shape[:-1], n_parts, rank)
    inputs = iter([inner[..., i, :] for i in range(n_parts)])
    products = [None if b is None else project(next(inputs), b, dtype) * kernel.scale for b in kernel.b]
    return kernel._joined(products, jnp).reshape(*x.shape[:-1], -1)


def declare(
    module: Declaring, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init
) -> Array | Quantized:
    """Declare a parameter with its shape, logical axes (`hydrajax.sharding`) and initialiser.

    A kernel that was quantised after loading (`hydrajax.lowbit.types.quantized_draft`) is returned as it is.
    """
    stored = module.get_variable("params", name)
    if isinstance(stored, Quantized):
        return stored
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, module.dtype)


def declare_kernel(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> Array | Quantized | LowRank:
    """Declare a product's weight, contracted over its first axis: normal with std 0.02, or quantised if
    ``module.quantize`` names a type.

    With ``module.adapter`` the weight is `LowRank`, which has no effect as initialised.
    """
    if module.quantize is None:
        kernel = declare(module, name, shape, axes, nn.initializers.normal(0.02))
    else:
        stored = module.get_variable("params", name)
        kernel = quantized_type(module.quantize, name, stored).declare(module, name, shape, axes)
    adapter: Adapter | None = module.adapter
    if adapter is None or not adapter.of(name):
        return kernel
    return _declare_low_rank(module, name, kernel, axes, adapter)


def declare_experts(module: nn.Module, name: str, count: int, shape: tuple[int, ...]) -> Array | Quantized:
    """Declare the kernels of all experts, of this shape each. Every array has a leading axis for experts."""
    of_each, axes = OfEach(module, count), (None,) * len(shape)
    if module.quantize is None:
        return declare(of_each, name, shape, axes, nn.initializers.normal(0.02))
    stored = of_each.get_variable("params", name)
    return quantized_type(module.quantize, name, stored).declare(of_each, name, shape, axes)


def _declare_low_rank(module: nn.Module, name: str, kernel: Array | Quantized, axes, adapter: Adapter) -> LowRank:
    """Declare an adapter's weights: A as in PEFT, uniform up to 1 / sqrt(D) (kaiming with a = sqrt(5)), B zero."""
    shape, targets = kernel.shape, adapter.of(name)
    limit = 1 / math.sqrt(shape[0])

    def uniform(rng, shape, dtype):
        return jax.random.uniform(rng, shape, dtype, -limit, limit)

    a = declare(module, f"{name}_lora_a", (shape[0], len(targets), adapter.rank), (axes[0], None, None), uniform)
    parameters = {f"{name}_lora_a": a}
    for part, features in part_shapes(name, shape).items():
        if part in targets:
            b = f"{name}_lora_b_{part}"
            parameters[b] = declare(module, b, (adapter.rank, *features), (None, *axes[1:]), nn.initializers.zeros)
    rng = module.make_rng("dropout") if adapter.dropout and module.has_rng("dropout") else None
    return low_rank(name, kernel, parameters, adapter)._replace(dropout=adapter.dropout, rng=rng)
