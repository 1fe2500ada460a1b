"""The part of a module that declares parameters, and modules that declare one parameter for many equal kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax

from hydrajax.models.arrays import Array, DType


@runtime_checkable
class Declaring(Protocol):
    """The part of a Flax module that declares parameters."""

    dtype: Any

    def get_variable(self, collection: str, name: str) -> Any:
        """Return a stored parameter, or None."""

    def param(self, name: str, init: Callable, *args: Any) -> Any:
        """Return a parameter, or ``init(rng, *args)`` in its place."""


class OfEach(NamedTuple):
    """A module whose parameters get a leading axis for experts."""

    module: nn.Module
    count: int

    @property
    def dtype(self) -> DType:
        return self.module.dtype

    def get_variable(self, collection: str, name: str) -> Any:
        """Return what one expert has of a stored parameter, by shape and dtype; None without it."""
        stored = self.module.get_variable(collection, name)
        return None if stored is None else jax.ShapeDtypeStruct(stored.shape[1:], stored.dtype)

    def param(self, name: str, init: Callable, shape: tuple[int, ...], *dtype: DType) -> Array:
        """Declare the parameter of all experts. Only their axis is divided over devices."""

        def of_all(rng):
            each = jax.vmap(lambda key: init(key, shape, *dtype).value)(jax.random.split(rng, self.count))
            return nn.LogicallyPartitioned(each, ("experts", *[None] * len(shape)))

        return self.module.param(name, of_all)
