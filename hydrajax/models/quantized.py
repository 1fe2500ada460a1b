"""Kernels of products in 8 and 4 bits: how they are stored and multiplied.

On one CPU device they lie in tiles for our own kernels (`hydrajax.models.kernels.few_bits`), which round x to 8 bits
too. Elsewhere `Int8`, with a scale per output, keeps the kernel's shape, and XLA widens it within the product.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from hydrajax.errors import HydrajaxError
from hydrajax.models import low_bit_products, platforms, products
from hydrajax.models.arrays import Array, DType
from hydrajax.models.declaring import Declaring
from hydrajax.models.group_rounding import ROWS, eight_bits, four_bits, in_groups
from hydrajax.models.kernels import few_bits
from hydrajax.models.kernels.few_rows import with_gradient_of

TILE_AXES, TILE = 5, (few_bits.COLUMNS, 4)  # the last two axes of tiles


def quantized_type(name: str, kernel: str, stored: Array | jax.ShapeDtypeStruct | None = None) -> type[Quantized]:
    """Return the class that stores a kernel of this name. The lm head, and an embedding that is one, take 8 bits.

    Args:
        name: One of `QUANTIZED`.
        kernel: The parameter's name.
        stored: Its first array if it exists: a program for an absent device is traced with the present one's.

    Raises:
        HydrajaxError: The device has no such numbers.
    """
    if name == FP8 and not platforms.has_fp8():
        raise HydrajaxError(
            "quantize: got fp8, expected an NVIDIA GPU of compute capability 8.9 or higher; without --quantize, files "
            "in fp8 are widened"
        )
    if name == FP8 and kernel != "lm_head":
        return Fp8
    if name not in EIGHT_BITS and kernel in ("lm_head", "embedding"):
        name = "int8"
    tiles, elsewhere = (EIGHT_BITS | FOUR_BITS)[name]
    return tiles if _in_tiles(stored) else elsewhere


def quantizes_embedding(name: str | None, stored: Array | None = None) -> bool:
    """Return whether an embedding that is also the lm head is quantised: where tiles are read in place."""
    return name is not None and _in_tiles(stored)


def _in_tiles(stored: Array | jax.ShapeDtypeStruct | None) -> bool:
    if stored is None:
        return platforms.has_few_bits()
    return stored.ndim == TILE_AXES and stored.shape[-2:] == TILE


# Kernels of drafts that only products read.
PRODUCTS = ("kernel", "shared_kernel", "path_kernel", "fc", "qkv", "out", "gate_up", "down")
PRODUCTS += ("lm_head", "lm_kernel", "lm_down", "lm_up", "copied_lm_head")


def quantized_draft(params: Mapping[str, Any], quantize: str | None) -> Mapping[str, Any]:
    """Return a draft's parameters with the kernels of products in `Int8Tiles`, if ``quantize`` names a type.

    They stay as they are where there are no kernels for tiles.
    """
    if quantize is None or not platforms.has_few_bits():
        return params
    return {
        name: quantized_draft(value, quantize)
        if isinstance(value, Mapping)
        else jax.device_put(Int8Tiles.of(np.asarray(value)))
        if name in PRODUCTS
        else value
        for name, value in params.items()
    }


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
        return products.parts_first(self.project(x, x.dtype), self.shape[1:])

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
            return products.matmul_parts(rows, kernel, dtype, stored=False)

        kernel = low_bit_products.int4_kernel(len(rows), self.values.shape, rows.dtype)
        if kernel is None:
            return plain(rows, *self.arrays().values())

        @with_gradient_of(plain)
        def product(rows, *arrays):
            padded = jnp.pad(rows, [(0, 0), (0, -rows.shape[1] % few_bits.GROUP)])
            return kernel(padded, *arrays, dtype)

        return product(rows, *self.arrays().values())


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

        product = kernel if platforms.has_few_bits() else plain
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


def _with_group(kind: type[Quantized], size: int) -> type[Quantized]:
    """Return a type that quantises with a scale, and an offset if it has some, for each ``size`` inputs."""
    found = type(f"{kind.__name__}By{size}", (kind,), {"group": size, "__doc__": f"Groups of {size} inputs."})
    arrays = [field.name for field in dataclasses.fields(kind) if field.name != "shape_"]
    return jax.tree_util.register_dataclass(found, data_fields=arrays, meta_fields=("shape_",))


# In tiles, and elsewhere.
EIGHT_BITS: dict[str, tuple[type[Quantized], type[Quantized]]] = {
    "int8": (Int8Tiles, Int8),
    **{f"int8-{size}": (_with_group(Int8Tiles, size), Int8) for size in (64, 128)},
}
FOUR_BITS: dict[str, tuple[type[Quantized], type[Quantized]]] = {
    "int4": (Int4Tiles, Int4),
    **{f"int4-{size}": (_with_group(Int4Tiles, size), _with_group(Int4, size)) for size in (64, 128)},
}
FP8 = "fp8"
QUANTIZED = (*EIGHT_BITS, *FOUR_BITS, FP8)  # by the user's name


def _in_pairs(numbers: UInt8[np.ndarray, "D F"]) -> UInt8[np.ndarray, "tiles groups 4 64 4"]:
    """Return numbers of 0 to 15 in tiles, two in a byte."""
    tiles, half = few_bits.to_tiles(numbers), few_bits.STEPS // 2
    return tiles[:, :, :half] | tiles[:, :, half:] << 4
