"""Kernels of products in 8 and 4 bits that keep the kernel's shape: XLA widens them within the product.

On one CPU device they lie in tiles (`hydrajax.lowbit.tiles`).
"""

from __future__ import annotations

import abc
import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax import ops
from hydrajax.errors import HydrajaxError
from hydrajax.lowbit import products as low_bit_products
from hydrajax.lowbit.kernels import few_bits
from hydrajax.lowbit.rounding import ROWS, four_bits, in_groups
from hydrajax.models.arrays import Array, DType
from hydrajax.models.declaring import Declaring
from hydrajax.ops.cpu.few_rows import with_gradient_of


class Quantized(abc.ABC):
    """A kernel ``[D, *features]`` of few-bit numbers.

    A subclass is a dataclass of arrays, registered as a pytree. Each field is a parameter of its own (`stored`), so a
    kernel is sharded, loaded and counted by its arrays.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape, ``(D, *features)``."""

    @classmethod
    @abc.abstractmethod
    def declare(cls, module: Declaring, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Quantized:
        """Declare the parameters of a kernel of this shape and these logical axes, with arbitrary initial values."""

    @classmethod
    @abc.abstractmethod
    def of(cls, kernel: np.ndarray) -> Quantized:
        """Quantise a kernel on the host; raises `HydrajaxError` for non-finite numbers."""

    @abc.abstractmethod
    def dequantized(self) -> Float[Array, " D *features"]:
        """Return the dequantised float32 kernel."""

    @abc.abstractmethod
    def project(self, x: Float[Array, "*rows D"], dtype) -> Float[Array, "*rows F"]:
        """Return ``x @ kernel`` in this dtype, as `project` does."""

    def project_parts(self, x: Float[Array, "*rows D"]) -> Float[Array, "*parts *rows F"]:
        """Return ``x @ kernel`` with the parts of a fused kernel as leading axes."""
        return ops.parts_first(self.project(x, x.dtype), self.shape[1:])

    def stored(self, name: str) -> dict[str, Array]:
        """Return the arrays by parameter name; the first has the kernel's own name."""
        first, *others = arrays = self.arrays()
        return {name: arrays[first]} | {f"{name}_{other}": arrays[other] for other in others}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by field, in order."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "shape_"}
        return {name: array for name, array in found.items() if array is not None}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Quantized):
    """``values * scale``: symmetric, one byte per number and a scale per output feature.

    Attributes:
        values: int8 ``[D, *features]``.
        scale: float32 ``[*features]``.
    """

    dtype, largest = jnp.int8, 127  # of a number

    values: Array
    scale: Float[Array, "*features"]

    @property
    def shape(self):
        return self.values.shape

    @classmethod
    def declare(cls, module, name, shape, axes):
        zeros = nn.with_logical_partitioning(lambda rng, shape: jnp.zeros(shape, cls.dtype), axes)
        ones = nn.with_logical_partitioning(lambda rng, shape: jnp.ones(shape, jnp.float32), axes[1:])
        return cls(module.param(name, zeros, shape), module.param(f"{name}_scale", ones, shape[1:]))

    @classmethod
    def of(cls, kernel):
        """Return the nearest kernel; each output feature's largest weight becomes the largest number."""
        # In blocks of rows: float32 copies of a whole lm head would be the peak of the host's memory.
        blocks = [slice(i, i + ROWS) for i in range(0, len(kernel), ROWS)]
        largest = np.zeros(kernel.shape[1:], np.float32)
        for rows in blocks:
            np.maximum(largest, np.max(np.abs(kernel[rows].astype(np.float32)), axis=0), out=largest)
        if not np.all(np.isfinite(largest)):
            raise HydrajaxError("quantize: got a weight that is not finite, expected finite numbers")
        scale = largest / np.float32(cls.largest)
        scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # for features of zeros, or nearly
        values = np.empty(kernel.shape, cls.dtype)
        for rows in blocks:
            values[rows] = cls._rounded(kernel[rows].astype(np.float32) / scale)
        return cls(values, scale)

    @staticmethod
    def _rounded(steps: np.ndarray) -> np.ndarray:
        return np.rint(steps)

    def dequantized(self):
        return self.values.astype(jnp.float32) * self.scale

    def project(self, x, dtype):
        values = self.values.reshape(x.shape[-1], -1)
        product = low_bit_products.matmul_scaled(x.reshape(-1, x.shape[-1]), values, self.scale.reshape(-1), dtype)
        return product.reshape(*x.shape[:-1], -1)

    def project_parts(self, x):
        product = low_bit_products.matmul_scaled(x.reshape(-1, x.shape[-1]), self.values, self.scale, x.dtype)
        return product.reshape(*self.shape[1:-1], *x.shape[:-1], self.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8(Int8):
    """``values * scale`` with values in float8_e4m3fn, for GPUs whose products read them (`platforms.has_fp8`)."""

    dtype, largest = jnp.float8_e4m3fn, 448

    @staticmethod
    def _rounded(steps):
        return steps.astype(jnp.float8_e4m3fn)


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale", "offset"), meta_fields=("shape_",))
@dataclasses.dataclass(frozen=True)
class Int4(Quantized):
    """The numbers of `Int4Tiles` away from a CPU, in the kernel's own order, so that its axes can be sharded.

    Attributes:
        values: uint8 ``[groups, 16, *features]``: two numbers of 0 to 15 in a byte. The first 16 inputs of a group lie
            in the low bits.
        scale, offset: float16 ``[groups, *features]``. Larger groups of inputs repeat theirs.
    """

    group = few_bits.GROUP  # inputs that share a scale

    values: Any
    scale: Any
    offset: Any
    shape_: tuple[int, ...]

    @property
    def shape(self):
        return self.shape_

    @classmethod
    def declare(cls, module, name, shape, axes):
        depth, *features = shape
        groups, (first, *others) = -(-depth // few_bits.GROUP), axes

        def declared(part: str, size: tuple[int, ...], axes: tuple[str | None, ...], dtype: DType):
            ones = nn.with_logical_partitioning(lambda rng, size: jnp.ones(size, dtype), axes)
            return module.param(part, ones, size)

        half = few_bits.GROUP // 2
        values = declared(name, (groups, half, *features), (first, None, *others), jnp.uint8)
        numbers = (declared(f"{name}_{part}", (groups, *features), axes, jnp.float16) for part in ("scale", "offset"))
        return cls(values, *numbers, shape)

    @classmethod
    def of(cls, kernel):
        """Return the kernel of `Int4Tiles.of`."""
        depth, *features = kernel.shape
        values, *numbers = in_groups(kernel, four_bits, cls.group)
        values = np.pad(values, [(0, -depth % few_bits.GROUP), (0, 0)])
        low, high = np.split(values.reshape(-1, few_bits.GROUP, values.shape[1]), 2, axis=1)
        pairs = (low | high << 4).reshape(*low.shape[:2], *features)
        scale, offset = (np.repeat(x, cls.group // few_bits.GROUP, axis=0)[: len(pairs)] for x in numbers)
        return cls(pairs, *(x.reshape(-1, *features) for x in (scale, offset)), kernel.shape)

    def dequantized(self):
        numbers = jnp.concatenate([self.values & 15, self.values >> 4], axis=1).astype(jnp.float32)
        scale, offset = (x.astype(jnp.float32)[:, None] for x in (self.scale, self.offset))
        return (numbers * scale + offset).reshape(-1, *self.shape_[1:])[: self.shape_[0]]

    def project(self, x, dtype):
        parts = len(self.shape_) - 2
        product = self._parts(x.reshape(-1, x.shape[-1]), dtype)
        return jnp.moveaxis(product, parts, 0).reshape(*x.shape[:-1], -1)

    def project_parts(self, x):
        product = self._parts(x.reshape(-1, x.shape[-1]), x.dtype)
        return product.reshape(*self.shape_[1:-1], *x.shape[:-1], self.shape_[-1])

    def _parts(self, rows: Float[Array, "rows D"], dtype) -> Float[Array, "*parts rows f"]:
        def plain(rows, *arrays):
            kernel = type(self)(*arrays, self.shape_).dequantized().astype(rows.dtype)
            return ops.matmul_parts(rows, kernel, dtype, stored=False)

        kernel = low_bit_products.int4_kernel(len(rows), self.values.shape, rows.dtype)
        if kernel is None:
            return plain(rows, *self.arrays().values())

        @with_gradient_of(plain)
        def product(rows, *arrays):
            padded = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % few_bits.GROUP)])
            return kernel(padded, *arrays, dtype)

        return product(rows, *self.arrays().values())
