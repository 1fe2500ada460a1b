"""Parameters of a batch: those of several rules or processors, stacked into arrays (`hydrajax.decoding.parameters`)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.parameters import LARGEST, T, effective, is_mixed
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array


def batched(rows: Sequence[T], like: Sequence[T] = ()) -> T:
    """Stack the parameters of several sequences into arrays ``[B]``: float32, int32 for integers.

    A parameter with an effect in some sequences is written out in the others, and the result is ``mixed``.

    Args:
        rows: The rules or processors of the sequences.
        like: Give the result the structure that it would have with these in the batch, so that all batches share a
            program.

    Raises:
        HydrajaxError: For sequences of several kinds, and for a parameter that some omit and that has no neutral value.
    """
    every, first = (*rows, *like), rows[0]
    if any(type(row) is not type(first) for row in every):
        raise HydrajaxError("rule: got several kinds in one batch, expected one kind with the same parameters")
    neutral = getattr(first, "NEUTRAL", {})
    used = [name for name in neutral if any(effective(row, name) is not None for row in every)]
    lacking = any(effective(row, name) is None for row in every for name in used)
    mixed = lacking or any(map(is_mixed, every))

    def written_out(row):
        found = copy.copy(row)
        for name in used:
            value = getattr(row, name)
            if value is None:
                value = neutral[name](row) if callable(neutral[name]) else LARGEST
            object.__setattr__(found, name, _as_array(value))
        object.__setattr__(found, "mixed", mixed)
        return found

    rows = [written_out(row) for row in rows]
    if len({jax.tree.structure(row) for row in rows}) > 1:
        raise HydrajaxError("rule: got several kinds in one batch, expected one kind with the same parameters")
    return jax.tree.map(lambda *xs: _xp(xs[0]).stack([_as_array(x) for x in xs]), *rows)


def broadcast(item: T, batch: int) -> T:
    """Repeat parameters for every sequence of a batch; arrays ``[B]`` stay as they are."""
    return jax.tree.map(lambda x: _xp(x).broadcast_to(_as_array(x), (batch, *np.shape(x)[1:])), item)


def with_all_effects(cls: type[T]) -> T:
    """Return an instance of which every parameter counts as having an effect, as `batched` takes it in ``like``."""
    found = cls()
    for name in getattr(cls, "NEUTRAL", {}):
        object.__setattr__(found, name, np.float32(0))
    return found


def _xp(x: Any):
    """Return NumPy for numbers on the host, so that a call of a compiled function dispatches nothing else."""
    return jnp if isinstance(x, jax.Array) else np


def _as_array(x: Any) -> Array:
    xp = _xp(x)
    return xp.asarray(x, np.int32 if xp.issubdtype(xp.result_type(x), np.integer) else np.float32)
