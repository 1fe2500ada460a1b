"""Rules and logits processors as pytrees of their sampling parameters, one value per sequence of a batch.

They are therefore part of the decode state, and another temperature is another argument of the same compiled program. A
parameter without effect (`effective`) is not a leaf, so a program contains only what is in use.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np

from hydrajax.errors import HydrajaxError

T = TypeVar("T")
LARGEST = np.int32(2**31 - 1)  # as top_k it keeps every token
# Bounds within which float32 logits stay finite. Below the least temperature the most likely token has all probability
# unless logits tie nearly; vLLM decodes greedily there, too.
LEAST_TEMPERATURE, LEAST_SHARE, LARGEST_NUMBER = 1e-5, 1e-30, 1e9


def parameters_as_arrays(cls: type[T]) -> type[T]:
    """Register a frozen dataclass of sampling parameters as a pytree of these parameters.

    ``NEUTRAL`` of the class gives the values without effect; a function gives that of an omitted one (None) from the
    others. An instance is ``mixed`` if the arrays of some sequences may hold such values
    (`hydrajax.decoding.batching.batched`); this is part of the tree's structure. Leaves may be arrays or anything that
    JAX puts in their place, and are not validated.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    validate = getattr(cls, "__post_init__", lambda item: None)

    def __post_init__(item):
        if traced := [name for name in names if isinstance(getattr(item, name), jax.core.Tracer)]:
            todo = f"make the {cls.__name__} outside of the program and pass it as an argument"
            raise HydrajaxError(f"{traced[0]}: got a traced value, expected a number: {todo}")
        validate(item)

    def flatten(item):
        return [(jax.tree_util.GetAttrKey(name), effective(item, name)) for name in names], is_mixed(item)

    def unflatten(mixed, leaves):
        item = object.__new__(cls)  # not __init__, which would compare tracers with 0
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(item, name, leaf)
        object.__setattr__(item, "mixed", mixed)
        return item

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    cls.__repr__, cls.__post_init__ = _shown, __post_init__
    return cls


def _shown(item: Any) -> str:
    """Return a dataclass's repr without keyword-only parameters that have no effect.

    Result files name rules by it, and the name must not change when rules gain parameters.
    """
    shown = [
        f"{each.name}={getattr(item, each.name)!r}"
        for each in dataclasses.fields(item)
        if not each.kw_only or effective(item, each.name) is not None
    ]
    return f"{type(item).__name__}({', '.join(shown)})"


def effective(item: Any, name: str) -> Any:
    """Return a parameter, or None if it has the value without effect."""
    value = getattr(item, name)
    is_number = isinstance(value, (int, float))
    return None if is_number and value == getattr(item, "NEUTRAL", {}).get(name) else value


def is_mixed(item: Any) -> bool:
    """Return whether the sequences of a batch may differ in which parameters have an effect."""
    return getattr(item, "mixed", False)


def bound(item: Any, **bounds: tuple[float, float]) -> None:
    """Set parameters of a frozen dataclass that lie outside ``(least, most)`` to the nearer of the two."""
    for name, (least, most) in bounds.items():
        value = getattr(item, name)
        if value is not None and not least <= value <= most:
            object.__setattr__(item, name, least if value < least else most)
