"""Rows of a decode state on the move: joining a batch, leaving it, and the batch in another shape.

Every array of a state has the rows as its first axis, and those that hold text also an axis of cache places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.state import DecodeState
from hydrajax.decoding.step import Engine


class Shapes:
    """Of an engine's states: so many rows, so many places in the cache."""

    def __init__(self, engine: Engine, rule: AcceptanceRule):
        self._made = functools.cache(lambda batch, slots: jax.eval_shape(lambda: engine.empty(batch, slots, rule)))

    def nbytes(self, batch: int, slots: int) -> int:
        """Of all arrays."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self._made(batch, slots)))

    def moved(self, state: DecodeState, rows: Sequence[int], slots: int) -> DecodeState:
        """A new state of the given rows, in that order; one may occur several times. The old one is left as it is."""
        wanted = tuple(like.shape for like in jax.tree.leaves(self._made(len(rows), slots)))
        return _moved_together(state, np.asarray(rows, np.int32), wanted)

    def reshaped(self, state: DecodeState, rows: Sequence[int], slots: int) -> DecodeState:
        """The same, array by array: each of the old ones is gone as soon as the new one is there, so that no more than
        one exists twice.
        """
        rows, wanted = np.asarray(rows, np.int32), jax.tree.leaves(self._made(len(rows), slots))
        leaves, treedef = jax.tree.flatten(state)
        for number, like in enumerate(wanted):
            old, leaves[number] = leaves[number], _moved(leaves[number], rows, like.shape)
            old.delete()
        return jax.tree.unflatten(treedef, leaves)


@functools.partial(jax.jit, donate_argnums=0)
def put_row(state: DecodeState, at: Int[np.ndarray, ""], row: DecodeState) -> DecodeState:
    """``state``, which is donated, with row ``at`` replaced by a state of one row, whatever its cache places.

    Those that the state has not must be empty.
    """
    return jax.tree.map(lambda x, new: x.at[at].set(_fitted(new, (1, *x.shape[1:]))[0]), state, row)


@functools.partial(jax.jit, static_argnums=2)
def _moved(x: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _fitted(x[rows], shape)


@functools.partial(jax.jit, static_argnums=2)
def _moved_together(state: DecodeState, rows: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> DecodeState:
    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [_fitted(x[rows], shape) for x, shape in zip(leaves, shapes, strict=True)])


def _fitted(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cut at the ends, or filled up with zeros."""
    for axis, (found, wanted) in enumerate(zip(x.shape, shape, strict=True)):
        if wanted < found:
            x = jax.lax.slice_in_dim(x, 0, wanted, axis=axis)
        elif wanted > found:
            x = jnp.pad(x, [(0, (wanted - found) * (number == axis)) for number in range(x.ndim)])
    return x
