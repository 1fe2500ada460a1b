"""Weights: how a module declares them, and how they are multiplied with.

A weight is an array, or `Int8`: one byte per number and a scale per output feature. Every matmul with one goes through
`project`.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.arrays import Array

ROWS = 256  # of a kernel that are quantised at once


class Int8(NamedTuple):
    """A weight-only quantised kernel: ``values * scale``, symmetric around zero, the scale per output feature.

    values: int8 ``[D, *features]``. scale: float32 ``[*features]``.
    """

    values: Array
    scale: Float[Array, "*features"]

    def dequantized(self) -> Float[Array, " D *features"]:
        return self.values.astype(jnp.float32) * self.scale


def quantize(kernel: np.ndarray) -> Int8:
    """The nearest int8 kernel, each output feature's largest weight being 127 (on the host)."""
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
    return Int8(values, scale)


def project(x: Float[Array, "*rows D"], kernel: Array | Int8, dtype=None) -> Float[Array, "*rows F"]:
    """``x @ kernel``, the kernel's axes after the first taken as one, F.

    dtype: of the result and of the accumulation, default ``x.dtype``.
    """
    dtype, width = dtype or x.dtype, x.shape[-1]
    if isinstance(kernel, Int8):
        values = kernel.values.reshape(width, -1).astype(x.dtype)
        product = backend.matmul(x, values, jnp.float32, stored=False)
        return (product * kernel.scale.reshape(-1)).astype(dtype)
    return backend.matmul(x, kernel.reshape(width, -1), dtype)


def declare(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init) -> Array:
    """A parameter with its shape, logical axes (`hydrajax.sharding`) and initialiser in one place."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, module.dtype)


def declare_kernel(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array | Int8:
    """A matmul's weight, contracted over its first axis: normal with std 0.02, or `Int8` where ``module.int8``.

    Of the latter nothing but the shape is meant before a checkpoint is loaded (`hydrajax.models.weights.quantize`).
    """
    if not module.int8:
        return declare(module, name, shape, axes, nn.initializers.normal(0.02))
    zeros = nn.with_logical_partitioning(lambda rng, shape: jnp.zeros(shape, jnp.int8), axes)
    ones = nn.with_logical_partitioning(lambda rng, shape: jnp.ones(shape, jnp.float32), axes[1:])
    return Int8(module.param(name, zeros, shape), module.param(f"{name}_scale", ones, shape[1:]))
