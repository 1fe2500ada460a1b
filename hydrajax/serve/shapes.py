"""Move sequences between decode states: join a batch, leave it, and change its shape.

Axis 0 of every array of a state is the batch, and the KV caches also have an axis of positions. Arrays are moved one by
one and sequence by sequence: take one out, cut or pad it to the new cache length, put it in. So there is no program
per pair of shapes but a few small ones per shape, which can all be compiled at the start.
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


class StateShapes:
    """The shapes of an executor's states by batch size and cache length.

    A sequence with another cache length must be rewound before it is used, if only to its present length
    (`hydrajax.drafters.drafter.Drafter.rewind`).
    """

    def __init__(self, executor: Executor, sampling: SamplingParams):
        self._state = functools.cache(lambda batch, cache_len: executor.abstract_state(batch, cache_len, sampling))

    def nbytes(self, batch: int, cache_len: int) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self._state(batch, cache_len)))

    def gather(self, state: State, slots: Sequence[int], cache_len: int) -> State:
        """Copy the given slots into a new state, in that order; only the first slot may be repeated."""
        return jax.tree.map(lambda x, like: _gather(x, slots, like.shape), state, self._state(len(slots), cache_len))

    def reshape(self, state: State, slots: Sequence[int], cache_len: int) -> State:
        """Like `gather`, but delete each old array after its copy, so that only one exists twice at a time."""
        leaves, treedef = jax.tree.flatten(state)
        for number, like in enumerate(jax.tree.leaves(self._state(len(slots), cache_len))):
            old, leaves[number] = leaves[number], _gather(leaves[number], slots, like.shape)
            old.delete()
        return jax.tree.unflatten(treedef, leaves)


def put_sequence(state: State, slot: int, sequence: State) -> State:
    """Replace a slot of ``state``, which is donated, by a state of batch size 1 with the same cache length."""
    return jax.tree.map(lambda x, new: _put(x, np.int32(slot), new), state, sequence)


def _gather(x: jax.Array, slots: Sequence[int], shape: tuple[int, ...]) -> jax.Array:
    def fitted(slot: int) -> jax.Array:
        taken = x if len(x) == 1 else _take(x, np.int32(slot))
        return taken if taken.shape[1:] == shape[1:] else _fit(taken, shape[1:])

    new = _tile(fitted(slots[0]), len(slots))
    for at, slot in enumerate(slots):
        if slot != slots[0]:
            new = _put(new, np.int32(at), fitted(slot))
    return new


@jax.jit
def _take(x: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, slot)


@functools.partial(jax.jit, static_argnums=1)
def _tile(sequence: jax.Array, count: int) -> jax.Array:
    """Repeat a sequence. A single one is copied too, because the original may be donated to another program."""
    return jnp.broadcast_to(sequence, (count, *sequence.shape[1:])) if count > 1 else jnp.array(sequence, copy=True)


@functools.partial(jax.jit, donate_argnums=0)
def _put(x: jax.Array, slot: jax.Array, sequence: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, sequence, slot, axis=0)


@functools.partial(jax.jit, static_argnums=1)
def _fit(sequence: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cut or zero-pad the ends of all axes but the first."""
    for axis, wanted in enumerate(shape, start=1):
        found = sequence.shape[axis]
        if wanted < found:
            sequence = jax.lax.slice_in_dim(sequence, 0, wanted, axis=axis)
        elif wanted > found:
            sequence = jnp.pad(sequence, [(0, (wanted - found) * (n == axis)) for n in range(sequence.ndim)])
    return sequence
