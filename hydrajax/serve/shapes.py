"""Rows of a decode state on the move: joining a batch, leaving it, and the batch in another shape.

Every array of a state has the rows as its first axis, and those that hold text also an axis of cache places. An array
is moved row by row, in programs of one array each: a row is taken out, fitted to other places, put in. So there is no
program for every pair of shapes that a batch may change between, but a few small ones for every shape, and all of them
can be compiled ahead of time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.spec import SamplingParams


class Shapes:
    """The shapes of an executor's states, by numbers of rows and of places in the cache.

    What has been given other places must be rewound (`hydrajax.drafters.drafter.Drafter.rewind`), if only to where it
    is.
    """

    def __init__(self, executor: Executor, sampling: SamplingParams):
        self._made = functools.cache(lambda batch, slots: executor.abstract_state(batch, slots, sampling))

    def nbytes(self, batch: int, slots: int) -> int:
        """Of all arrays."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self._made(batch, slots)))

    def moved(self, state: State, rows: Sequence[int], slots: int) -> State:
        """A new state of the given rows, in that order; the first may occur several times. The old one stays."""
        return jax.tree.map(lambda x, like: _moved(x, rows, like.shape), state, self._made(len(rows), slots))

    def reshaped(self, state: State, rows: Sequence[int], slots: int) -> State:
        """The same, array by array: each of the old ones is gone as soon as the new one is there, so that no more than
        one exists twice.
        """
        leaves, treedef = jax.tree.flatten(state)
        for number, like in enumerate(jax.tree.leaves(self._made(len(rows), slots))):
            old, leaves[number] = leaves[number], _moved(leaves[number], rows, like.shape)
            old.delete()
        return jax.tree.unflatten(treedef, leaves)


def put_row(state: State, at: int, row: State) -> State:
    """``state``, which is donated, with row ``at`` replaced by a state of one row and the same places."""
    return jax.tree.map(lambda x, new: _put(x, np.int32(at), new), state, row)


def _moved(x: jax.Array, rows: Sequence[int], shape: tuple[int, ...]) -> jax.Array:
    def fitted(row: int) -> jax.Array:
        taken = x if len(x) == 1 else _taken(x, np.int32(row))
        return taken if taken.shape[1:] == shape[1:] else _fitted(taken, shape[1:])

    new = _spread(fitted(rows[0]), len(rows))
    for at, row in enumerate(rows):
        if row != rows[0]:
            new = _put(new, np.int32(at), fitted(row))
    return new


@jax.jit
def _taken(x: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, row)


@functools.partial(jax.jit, static_argnums=1)
def _spread(row: jax.Array, count: int) -> jax.Array:
    """So many copies of a row. A single one is a copy, too: what it is made of may be donated to another program."""
    return jnp.broadcast_to(row, (count, *row.shape[1:])) if count > 1 else jnp.array(row, copy=True)


@functools.partial(jax.jit, donate_argnums=0)
def _put(x: jax.Array, at: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, row, at, axis=0)


@functools.partial(jax.jit, static_argnums=1)
def _fitted(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cut at the ends, or filled up with zeros."""
    for axis, wanted in enumerate(shape, start=1):
        found = row.shape[axis]
        if wanted < found:
            row = jax.lax.slice_in_dim(row, 0, wanted, axis=axis)
        elif wanted > found:
            row = jnp.pad(row, [(0, (wanted - found) * (number == axis)) for number in range(row.ndim)])
    return row
