"""Move sequences between decode states: join a batch, leave it, and change its shape.

Axis 0 of every array of a state is the batch, and the KV caches also have an axis of positions. Sequences are moved one
by one: take one out, cut or pad it to the new cache length, put it in. So there is no program per pair of shapes but a
few small ones per shape, which can all be compiled at the start. A program moves all arrays of a sequence, because each
call costs more than a small copy. A change of shape moves them array by array.
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

    def has(self, state: State, batch: int, cache_len: int) -> bool:
        """Return whether a state has this batch size and cache length."""
        wanted = self._state(batch, cache_len)
        return all(jax.tree.leaves(jax.tree.map(lambda x, like: x.shape == like.shape, state, wanted)))

    def gather(self, state: State, slots: Sequence[int], cache_len: int) -> State:
        """Copy the given slots into a new state, in that order; only the first slot may be repeated."""
        return _gather(state, slots, self._state(len(slots), cache_len))

    def reshape(self, state: State, slots: Sequence[int], cache_len: int) -> State:
        """Like `gather`, but delete each old array after its copy, so that only one exists twice at a time."""
        leaves, treedef = jax.tree.flatten(state)
        for number, like in enumerate(jax.tree.leaves(self._state(len(slots), cache_len))):
            old = leaves[number]
            leaves[number] = _gather(old, slots, like)
            old.delete()
        return jax.tree.unflatten(treedef, leaves)


@functools.partial(jax.jit, donate_argnums=0)
def put_sequence(state: State, slot: jax.Array | np.int32, sequence: State) -> State:
    """Replace a slot of ``state``, which is donated, by a state of batch size 1 with the same cache length."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, slot, axis=0), state, sequence)


def _gather(state: State, slots: Sequence[int], like: State) -> State:
    """Copy slots of a state, or of one of its arrays, into arrays with the shapes of ``like``."""
    alone = len(jax.tree.leaves(state)[0]) == 1

    def fitted(slot: int) -> State:
        taken = state if alone else _take(state, np.int32(slot))
        return jax.tree.map(lambda x, to: x if x.shape[1:] == to.shape[1:] else _fit(x, to.shape[1:]), taken, like)

    # The only sequence of a state is copied too, because the original may be donated to another program.
    new = fitted(slots[0]) if len(slots) == 1 and not alone else _tile(fitted(slots[0]), len(slots))
    for at, slot in enumerate(slots):
        if slot != slots[0]:
            new = put_sequence(new, np.int32(at), fitted(slot))
    return new


@jax.jit
def _take(state: State, slot: jax.Array) -> State:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot), state)


@functools.partial(jax.jit, static_argnums=1)
def _tile(sequence: State, count: int) -> State:
    def tiled(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (count, *x.shape[1:])) if count > 1 else jnp.array(x, copy=True)

    return jax.tree.map(tiled, sequence)


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
