"""Kernels of products in 8 and 4 bits: how they are stored and multiplied.

On one CPU device they lie in tiles for our own kernels (`hydrajax.models.kernels.few_bits`), which round x to 8 bits
too. Elsewhere `Int8` keeps the kernel's shape, and XLA widens it within the product.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float16, Int

from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.arrays import Array, DType
from hydrajax.models.kernels import few_bits
from hydrajax.models.kernels.few_rows import with_gradient_of

ROWS = 256  # rows of a kernel quantised at once, a multiple of a group

QUANTIZED = ("int8", "int4")  # by the user's name


def quantized_type(name: str, kernel: str) -> type[Quantized]:
    """Return the class that stores a kernel of this name. The lm head, and an embedding that is one, take 8 bits."""
    if name == "int4" and kernel not in ("lm_head", "embedding"):
        return Int4Tiles
    return Int8Tiles if backend.has_few_bits() else Int8


def quantizes_embedding(name: str | None) -> bool:
    """Return whether an embedding that is also the lm head is quantised: where tiles are read in place."""
    return name is not None and backend.has_few_bits()


class Quantized(abc.ABC):
    """A kernel ``[D, *features]`` of few-bit numbers (weights only; activations keep their dtype).

    A subclass is a dataclass of arrays, registered as a pytree. Each field is a parameter of its own (`stored`), so a
    kernel is sharded, loaded and counted by its arrays.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape, ``(D, *features)``."""

    @classmethod
    @abc.abstractmethod
    def declare(cls, module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Quantized:
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

    def stored(self, name: str) -> dict[str, Array]:
        """Return the arrays by parameter name; the first has the kernel's own name."""
        first, *others = arrays = self.arrays()
        return {name: arrays[first]} | {f"{name}_{other}": arrays[other] for other in others}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by field, in order."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "shape_"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Quantized):
    """``values * scale``: symmetric, one byte per number and a scale per output feature.

    Attributes:
        values: int8 ``[D, *features]``.
        scale: float32 ``[*features]``.
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
        """Return the nearest int8 kernel; each output feature's largest weight becomes 127."""
        # In blocks of rows: float32 copies of a whole lm head would be the peak of the host's memory.
        blocks = [slice(i, i + ROWS) for i in range(0, len(kernel), ROWS)]
        largest = np.zeros(kernel.shape[1:], np.float32)
        for rows in blocks:
            np.maximum(largest, np.max(np.abs(kernel[rows].astype(np.float32)), axis=0), out=largest)
        if not np.all(np.isfinite(largest)):
            raise HydrajaxError("quantize: got a weight that is not finite, expected finite numbers")
        scale = largest / np.float32(127)
        scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # for features of zeros, or nearly
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


class Tiles(Quantized):
    """A kernel whose features are the columns of `few_bits.to_tiles`. It is not sharded.

    ``shape_`` is the kernel's shape, a constant of programs.
    """

    shape_: tuple[int, ...]

    @property
    def shape(self):
        return self.shape_

    @classmethod
    @abc.abstractmethod
    def parameters(cls, depth: int, width: int) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Return shape and dtype of each array."""

    @staticmethod
    @abc.abstractmethod
    def widened(depth: int, width: int, *arrays: Array) -> Float[Array, "D F"]:
        """Return the kernel of these arrays in float32."""

    @classmethod
    def declare(cls, module, name, shape, axes):
        del axes

        def declared(field: str, size: tuple[int, ...], dtype: DType):
            ones = nn.with_logical_partitioning(lambda rng, size: jnp.ones(size, dtype), (None,) * len(size))
            return module.param(name if field == "values" else f"{name}_{field}", ones, size)

        parameters = cls.parameters(shape[0], math.prod(shape[1:]))
        return cls(**{field: declared(field, *what) for field, what in parameters.items()}, shape_=shape)

    def dequantized(self):
        depth, *features = self.shape_
        return self.widened(depth, math.prod(features), *self.arrays().values()).reshape(self.shape_)

    def project(self, x, dtype):
        depth, width = x.shape[-1], math.prod(self.shape_[1:])

        def plain(rows, *arrays):
            return rows @ self.widened(depth, width, *arrays)

        @with_gradient_of(plain)
        def kernel(rows, *arrays):
            return few_bits.matmul(rows, width, *arrays)

        product = kernel if backend.has_few_bits() else plain
        rows = x.reshape(-1, depth).astype(jnp.float32)
        return product(rows, *self.arrays().values()).reshape(*x.shape[:-1], -1).astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=("shape_",))
@dataclasses.dataclass(frozen=True)
class Int8Tiles(Tiles):
    """The numbers of `Int8` in tiles.

    Attributes:
        values: int8 (`few_bits.tile_shape`).
        scale: float32 ``[F]``.
    """

    values: Array
    scale: Float[Array, " F"]
    shape_: tuple[int, ...]

    @classmethod
    def parameters(cls, depth, width):
        return {"values": (few_bits.tile_shape(depth, width), jnp.int8), "scale": ((width,), jnp.float32)}

    @classmethod
    def of(cls, kernel):
        plain = Int8.of(kernel)
        depth = len(kernel)
        return cls(few_bits.to_tiles(plain.values.reshape(depth, -1)), plain.scale.reshape(-1), kernel.shape)

    @staticmethod
    def widened(depth, width, values, scale):
        return few_bits.from_tiles(values, depth, width).astype(jnp.float32) * scale

    def columns(self, at: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Return some columns in float32: rows of an embedding that is also the lm head."""
        picked = self.values[at // few_bits.COLUMNS, :, :, at % few_bits.COLUMNS]  # [*rows, groups, 8, 4]
        rows = picked.reshape(*at.shape, math.prod(picked.shape[at.ndim :]))[..., : self.shape_[0]]
        return rows.astype(jnp.float32) * self.scale[at][..., None]

    def select(self, columns: Int[np.ndarray, " n"]) -> Int8Tiles:
        """Return the kernel of some columns, which are constants of the program."""
        picked = few_bits.select(self.values, columns)
        return Int8Tiles(picked, self.scale[columns], (self.shape_[0], len(columns)))


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale", "offset"), meta_fields=("shape_",))
@dataclasses.dataclass(frozen=True)
class Int4Tiles(Tiles):
    """``values * scale + offset`` with a scale and an offset for each 32 inputs of an output, like GGUF's Q4_1.

    Attributes:
        values: uint8, two numbers of 0 to 15 in a byte (`few_bits.tile_shape`).
        scale, offset: float16 (`few_bits.per_group`).
    """

    values: Array
    scale: Float16[Array, "tiles groups 64"]
    offset: Float16[Array, "tiles groups 64"]
    shape_: tuple[int, ...]

    @classmethod
    def parameters(cls, depth, width):
        tiles = few_bits.tile_shape(depth, width, per_byte=2)
        numbers = ((*tiles[:2], few_bits.COLUMNS), jnp.float16)
        return {"values": (tiles, jnp.uint8), "scale": numbers, "offset": numbers}

    @classmethod
    def of(cls, kernel):
        """Return the kernel in which each group's least and largest number are kept, to float16; numbers that were in
        Q4_1 stay what they are.
        """
        flat = kernel.reshape(len(kernel), -1)
        blocks = [cls._of_rows(flat[at : at + ROWS].astype(np.float32)) for at in range(0, len(flat), ROWS)]
        values, scale, offset = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        tiles = few_bits.to_tiles(values)
        half = few_bits.STEPS // 2
        packed = tiles[:, :, :half] | tiles[:, :, half:] << 4
        return cls(packed, few_bits.per_group(scale), few_bits.per_group(offset), kernel.shape)

    @staticmethod
    def _of_rows(rows: Float[np.ndarray, "n F"]):
        """Return numbers ``[n, F]``, scales and offsets ``[groups, F]``."""
        padded = np.pad(rows, [(0, -len(rows) % few_bits.GROUP), (0, 0)], mode="edge")
        groups = padded.reshape(-1, few_bits.GROUP, rows.shape[1])
        least, largest = groups.min(axis=1), groups.max(axis=1)
        if not max(np.abs(least).max(), np.abs(largest).max()) < np.finfo(np.float16).max:
            raise HydrajaxError("quantize: got a weight that is not finite, expected numbers within float16")
        scale, offset = ((largest - least) / 15).astype(np.float16), least.astype(np.float16)
        steps = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
        numbers = np.rint((groups - offset[:, None].astype(np.float32)) / steps[:, None])
        return np.clip(numbers, 0, 15).astype(np.uint8).reshape(-1, rows.shape[1])[: len(rows)], scale, offset

    @staticmethod
    def widened(depth, width, values, scale, offset):
        tiles = jnp.concatenate([values & 15, values >> 4], axis=2).astype(jnp.float32)
        scale, offset = (x.astype(jnp.float32)[:, :, None, :, None] for x in (scale, offset))
        return few_bits.from_tiles(tiles * scale + offset, depth, width)
