"""Weights: declaration in modules, and multiplication.

A weight is an array, a `Quantized` kernel, or `hydrajax.models.adapter.LowRank`, one of these two with an adapter.
A quantised kernel is one node of the parameters. Its class defines how it is stored and multiplied.
Matmuls with kernels go through `project`, with fused ones through `project_parts`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, dataclass_transform

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax import ops, plugins
from hydrajax.models.arrays import Array, DType
from hydrajax.models.layout import Parameter

Axes = tuple[str | None, ...]  # logical names (`hydrajax.sharding`)
Weight = Any  # an array, or a kernel with the methods `project` and `project_parts`
SHAPE = "shape_"  # the field of a quantised kernel that is no array
AS_STORED, WIDENED = "auto", "none"  # as a file stores the weights (`hydrajax.formats.huggingface`), and float ones


@dataclass_transform(frozen_default=True)
class Quantized(abc.ABC):
    """A kernel ``[D, *features]`` that is stored in other numbers than the model's.

    A subclass becomes a frozen dataclass and a pytree. Its annotated fields are arrays, which are sharded, loaded and
    counted one by one; a field ``shape_`` is the kernel's shape, a constant of programs. Its name among the parts
    "weights" (`hydrajax.plugins`) is what ``quantize`` takes (docs/low_bits.md).

    Attributes:
        scaled_outputs: Its arrays are numbers of the kernel's shape and a scale of each output feature.
    """

    scaled_outputs = False

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        names = [field.name for field in dataclasses.fields(dataclasses.dataclass(frozen=True)(cls))]
        jax.tree_util.register_dataclass(cls, [name for name in names if name != SHAPE], [SHAPE] * (SHAPE in names))

    @classmethod
    def stores(cls, name: str) -> type[Quantized] | None:
        """Return the class that stores a base's kernel of this name on this device; None leaves it in floats.

        An "embedding" is asked for if it is also the lm head, or per layer. It is then stored as a kernel ``[D, V]``.

        Raises:
            HydrajaxError: The device has no such numbers.
        """
        return None if name == "embedding" else cls

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape, ``(D, *features)``."""
        return getattr(self, SHAPE)

    @classmethod
    @abc.abstractmethod
    def arrays_of(cls, shape: tuple[int, ...], axes: Axes) -> dict[str, tuple[tuple[int, ...], DType, Axes]]:
        """Return shape, dtype and logical axes of each array of a kernel with this shape and these axes."""

    @classmethod
    @abc.abstractmethod
    def of(cls, kernel: np.ndarray | Parameter) -> Quantized:
        """Quantise a kernel on the host; raises `HydrajaxError` for non-finite numbers."""

    @abc.abstractmethod
    def dequantized(self) -> Float[Array, " D *features"]:
        """Return the dequantised float32 kernel."""

    def project(self, x: Float[Array, "*rows D"], dtype: DType) -> Float[Array, "*rows F"]:
        """Return ``x @ kernel`` in this dtype, as `project` does."""
        kernel = self.dequantized().astype(x.dtype).reshape(x.shape[-1], -1)
        return ops.matmul(x, kernel, dtype, stored=False)

    def project_parts(self, x: Float[Array, "*rows D"]) -> Float[Array, "*parts *rows F"]:
        """Return ``x @ kernel`` with the parts of a fused kernel as leading axes."""
        return ops.parts_first(self.project(x, x.dtype), self.shape[1:])

    def project_pairs(self, x: Float[Array, "R_or_pairs D"], experts: Int[Array, "R k"], dtype: DType) -> Array | None:
        """Return the product ``[pairs, F]`` of every row with each of its experts, where the arrays have a leading axis
        for experts; None without a kernel for it.
        """
        return None

    def columns(self, at: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Return some columns in float32: rows of an embedding that is also the lm head."""
        return jnp.moveaxis(self.dequantized()[:, at], 0, -1)

    def select(self, columns: Int[np.ndarray, " n"], dtype: DType) -> Array | Quantized:
        """Return the kernel of some columns, which are constants of the program; a float one in this dtype."""
        return self.dequantized().astype(dtype)[:, columns]

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by field, in order, or what stands in their places."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != SHAPE}
        return {name: array for name, array in found.items() if array is not None}

    @classmethod
    def boxed(cls, shape: tuple[int, ...], axes: Axes) -> Quantized:
        """Return a kernel of arbitrary numbers with its logical axes."""
        arrays = {
            name: nn.LogicallyPartitioned(jnp.ones(size, dtype), names)
            for name, (size, dtype, names) in cls.arrays_of(shape, axes).items()
        }
        return cls(**arrays, **({SHAPE: shape} if SHAPE in cls.__dataclass_fields__ else {}))


def quantized_type(quantize: str | None, name: str) -> type[Quantized] | None:
    """Return the class that stores a base's kernel of this name, for a weight type by its name; None for floats."""
    return None if quantize is None else plugins.find("weights", quantize).stores(name)


def described(dtype: str, quantize: str | None) -> str:
    """Describe the numbers of a base for messages."""
    return dtype if quantize in (None, WIDENED) else f"{dtype} with {quantize} weights"


def project(x: Float[Array, "*rows D"], kernel: Weight, dtype: DType | None = None) -> Float[Array, "*rows F"]:
    """Return ``x @ kernel``, with the kernel's axes after the first flattened to F.

    Args:
        dtype: Of the result and the accumulation; default ``x.dtype``.
    """
    dtype = dtype or x.dtype
    if hasattr(kernel, "project"):
        return kernel.project(x, dtype)
    return ops.matmul(x, kernel.reshape(x.shape[-1], -1), dtype)


def project_parts(
    x: Float[Array, "*rows D"], kernel: Weight, trained: int | None = None
) -> Float[Array, "*parts *rows F"]:
    """Return ``x @ kernel`` of a fused kernel ``[D, *parts, F]`` with its parts as leading axes; ``trained`` as in
    `hydrajax.ops.matmul_parts`.
    """
    if hasattr(kernel, "project_parts"):
        return kernel.project_parts(x)
    return ops.matmul_parts(x, kernel, x.dtype, trained=trained)


def declare(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: Axes, init, quantize: str | None = None
) -> Array | Quantized:
    """Declare a parameter with its shape, logical axes (`hydrajax.sharding`) and initialiser; or, if ``quantize`` names
    a weight type that stores it, a quantised kernel.

    A kernel that is stored already keeps its class, which may be that of another device.
    """
    stored = module.get_variable("params", name)
    if isinstance(stored, Quantized):
        return stored
    if stored is None and (kind := quantized_type(quantize, name)):
        return module.param(name, lambda rng: kind.boxed(shape, axes))
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, module.dtype)


def declare_kernel(module: nn.Module, name: str, shape: tuple[int, ...], axes: Axes) -> Weight:
    """Declare a product's weight, contracted over its first axis: normal with std 0.02, or quantised if
    ``module.quantize`` names a type.

    With ``module.adapter`` the weight is `hydrajax.models.adapter.LowRank`, which has no effect as initialised.
    """
    kernel = declare(module, name, shape, axes, nn.initializers.normal(0.02), module.quantize)
    adapter = module.adapter
    return adapter.declare(module, name, kernel, axes) if adapter is not None and adapter.of(name) else kernel


def declare_embedding(module: nn.Module, vocab_size: int, width: int, quantize: bool) -> Array | Quantized:
    """Declare the parameter "embedding": an array ``[V, D]``; or a quantised kernel ``[D, V]``, if ``module.quantize``
    stores one and ``quantize`` allows it.
    """
    stored = module.get_variable("params", "embedding")
    kind = quantized_type(module.quantize, "embedding") if stored is None else type(stored)
    if quantize and kind is not None and issubclass(kind, Quantized):
        return declare_kernel(module, "embedding", (width, vocab_size), ("width", "vocab"))
    return declare(module, "embedding", (vocab_size, width), ("vocab", "width"), nn.initializers.normal(0.02))


def embedded(embedding: Array | Quantized, tokens: Int[Array, "*rows"], dtype: DType) -> Float[Array, "*rows D"]:
    """Return the rows of tokens; ids outside the vocabulary are clipped."""
    if isinstance(embedding, Quantized):
        return embedding.columns(jnp.clip(tokens, 0, embedding.shape[1] - 1)).astype(dtype)
    return ops.take_rows(embedding, tokens)
