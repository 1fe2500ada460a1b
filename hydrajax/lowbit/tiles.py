"""Kernels of products in 8 and 4 bits in tiles for our own kernels on one CPU device, which round x to 8 bits too.

See `hydrajax.lowbit.kernels.few_bits`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from hydrajax.lowbit.kernels import few_bits
from hydrajax.lowbit.quantized import Quantized
from hydrajax.lowbit.rounding import eight_bits, four_bits, in_groups
from hydrajax.models.arrays import Array, DType
from hydrajax.ops import trace
from hydrajax.ops.cpu.few_rows import with_gradient_of


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
        """Declare the parameters; stored ones may have groups and dtypes of their own, as a file had them."""
        del axes

        def declared(field: str, size: tuple[int, ...], dtype: DType):
            ones = nn.with_logical_partitioning(lambda rng, size: jnp.ones(size, dtype), (None,) * len(size))
            key = name if field == "values" else f"{name}_{field}"
            stored = module.get_variable("params", key)
            return module.param(key, ones, size if stored is None else stored.shape)

        parameters = cls.parameters(shape[0], math.prod(shape[1:]))
        if module.get_variable("params", f"{name}_order") is not None:
            parameters["order"] = (shape[:1], jnp.int32)
        return cls(**{field: declared(field, *what) for field, what in parameters.items()}, shape_=shape)

    order = None  # the kernel's rows in the order of its groups, int32 [D]; None: their own

    def numbers(self) -> list[Array]:
        """Return the arrays without the order."""
        return [array for name, array in self.arrays().items() if name != "order"]

    def dequantized(self):
        depth, *features = self.shape_
        kernel = self.widened(depth, math.prod(features), *self.numbers()).reshape(self.shape_)
        return kernel if self.order is None else kernel[jnp.argsort(self.order)]

    def project(self, x, dtype):
        depth, width = x.shape[-1], math.prod(self.shape_[1:])

        def plain(rows, *arrays):
            return rows @ self.widened(depth, width, *arrays)

        @with_gradient_of(plain)
        def kernel(rows, *arrays):
            return few_bits.matmul(rows, width, *arrays)

        product = kernel if trace.has_few_bits() else plain
        rows = x.reshape(-1, depth).astype(jnp.float32)
        rows = rows if self.order is None else jnp.take(rows, self.order, axis=1, mode="clip")
        return product(rows, *self.numbers()).reshape(*x.shape[:-1], -1).astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=("shape_",))
@dataclasses.dataclass(frozen=True)
class Int8Tiles(Tiles):
    """``values * scale`` with a scale for each 32 inputs of an output, like GGUF's Q8_0.

    Attributes:
        values: int8 (`few_bits.tile_shape`).
        scale: float16 ``[tiles, groups, 64]`` (`few_bits.per_group`).
    """

    group = few_bits.GROUP  # inputs that share a scale

    values: Any  # leaves of a pytree, which transformations replace by other things than arrays
    scale: Any
    shape_: tuple[int, ...]

    @classmethod
    def parameters(cls, depth, width):
        tiles = few_bits.tile_shape(depth, width)
        return {"values": (tiles, jnp.int8), "scale": (few_bits.scale_shape(depth, width, cls.group), jnp.float16)}

    @classmethod
    def of(cls, kernel):
        """Return the nearest kernel; the largest number of each group becomes 127."""
        values, scale = in_groups(kernel, eight_bits, cls.group)
        return cls(few_bits.to_tiles(values), few_bits.per_group(scale), kernel.shape)

    @staticmethod
    def widened(depth, width, values, scale):
        scale = few_bits.for_tiles(scale.astype(jnp.float32), values.shape[1], axis=1)[:, :, None, :, None]
        return few_bits.from_tiles(values.astype(jnp.float32) * scale, depth, width)

    def columns(self, at: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Return some columns in float32: rows of an embedding that is also the lm head."""
        tile, place = at // few_bits.COLUMNS, at % few_bits.COLUMNS
        scale = self.scale[tile, :, place].astype(jnp.float32)  # [*rows, scales]
        scale = few_bits.for_tiles(scale, self.values.shape[1], axis=-1)[..., None, None]
        rows = self.values[tile, :, :, place].astype(jnp.float32) * scale  # [*rows, groups, 8, 4]
        return rows.reshape(*at.shape, math.prod(rows.shape[at.ndim :]))[..., : self.shape_[0]]

    def select(self, columns: Int[np.ndarray, " n"]) -> Int8Tiles:
        """Return the kernel of some columns, which are constants of the program."""
        values, scale = few_bits.select(self.values, self.scale, columns)
        return type(self)(values, scale, (self.shape_[0], len(columns)))


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale", "offset", "order"), meta_fields=("shape_",))
@dataclasses.dataclass(frozen=True)
class Int4Tiles(Tiles):
    """``values * scale + offset`` with a scale and an offset for each 32 inputs of an output, like GGUF's Q4_1.

    Layers of other programs' files (`of_numbers`) are ``(values - offset) * scale``, with groups of their own. They
    keep their zeros, a byte each: float16 cannot hold ``-zero * scale``, and float32 offsets would take four.

    Attributes:
        values: uint8, two numbers of 0 to 15 in a byte (`few_bits.tile_shape`).
        scale: float16 (`few_bits.scale_shape`), or float32 where a file's scales do not fit.
        offset: float16 with the scale's shape, or uint8 zeros.
        order: int32 ``[D]``, the kernel's rows in the order of the tiles, which makes groups of rows that are apart
            consecutive (GPTQ's ``desc_act``). x is reordered before the product. None: the kernel's own order.
    """

    group = few_bits.GROUP  # inputs that share a scale, where a float kernel is quantised

    values: Any
    scale: Any
    offset: Any
    shape_: tuple[int, ...]
    order: Any = None

    @classmethod
    def parameters(cls, depth, width):
        tiles = few_bits.tile_shape(depth, width, per_byte=2)
        numbers = (few_bits.scale_shape(depth, width, cls.group), jnp.float16)
        return {"values": (tiles, jnp.uint8), "scale": numbers, "offset": numbers}

    @classmethod
    def of(cls, kernel):
        """Return the kernel that keeps the least and largest number of each group; what was in Q4_1 stays the same."""
        values, scale, offset = in_groups(kernel, four_bits, cls.group)
        return cls(_in_pairs(values), few_bits.per_group(scale), few_bits.per_group(offset), kernel.shape)

    @classmethod
    def of_numbers(
        cls,
        numbers: UInt8[np.ndarray, "D F"],
        scale: Float[np.ndarray, "groups F"],
        zeros: UInt8[np.ndarray, "groups F"],
        shape: tuple[int, ...],
        order: Int[np.ndarray, " D"] | None = None,
    ) -> Int4Tiles:
        """Return the kernel ``(numbers - zeros) * scale`` without rounding.

        Args:
            numbers: 0 to 15.
            scale: For 32, 64 or 128 inputs each, of any float type.
            zeros: What is subtracted from the numbers.
            shape: The kernel's, ``(D, *features)``.
            order: Row i of the numbers is row ``order[i]`` of the kernel; None for row i.
        """
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16)
        scale = half if np.array_equal(half.astype(np.float32), scale) else scale.astype(np.float32)
        return cls(_in_pairs(numbers), few_bits.per_group(scale), few_bits.per_group(zeros), shape, order)

    @staticmethod
    def widened(depth, width, values, scale, offset):
        tiles = jnp.concatenate([values & 15, values >> 4], axis=2).astype(jnp.float32)
        has_zeros = offset.dtype == jnp.uint8
        scale, offset = (
            few_bits.for_tiles(numbers.astype(jnp.float32), tiles.shape[1], axis=1)[:, :, None, :, None]
            for numbers in (scale, offset)
        )
        wide = (tiles - offset) * scale if has_zeros else tiles * scale + offset
        return few_bits.from_tiles(wide, depth, width)


def _in_pairs(numbers: UInt8[np.ndarray, "D F"]) -> UInt8[np.ndarray, "tiles groups 4 64 4"]:
    """Return numbers of 0 to 15 in tiles, two in a byte."""
    tiles, half = few_bits.to_tiles(numbers), few_bits.STEPS // 2
    return tiles[:, :, :half] | tiles[:, :, half:] << 4
