"""Move sequences between decode states: join a batch, leave it, and change its shape.

Axis 0 of every array of a state is the batch, and the KV caches also have an axis of positions. Sequences are moved one
by one: take one out, cut or pad it to the new cache length, put it in. So there is no program per pair of shapes but a
few small ones per shape, which can all be compiled at the start. A program moves all arrays of a sequence, because each
call costs more than a small copy. A change of shape moves them array by array.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

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
        self.nbytes = functools.cache(self._nbytes)  # asked for several times in every iteration of the batcher

    def _nbytes(self, batch: int, cache_len: int) -> int:
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


def put_sequence(state: State, slot: int, sequence: State) -> State:
    """Replace a slot of ``state``, which is donated, by a state of batch size 1 with the same cache length."""
    return _by_devices(_put, state, sequence, at=np.int32(slot))


def _gather(state: State, slots: Sequence[int], like: State) -> State:
    """Copy slots of a state, or of one of its arrays, into arrays with the shapes of ``like``."""
    alone = len(jax.tree.leaves(state)[0]) == 1

    def fitted(slot: int) -> State:
        taken = state if alone else _by_devices(_take, state, at=np.int32(slot))
        return jax.tree.map(lambda x, to: x if x.shape[1:] == to.shape[1:] else _fit(x, to.shape[1:]), taken, like)

    # The only sequence of a state is copied too, because the original may be donated to another program.
    new = fitted(slots[0])
    if len(slots) > 1 or alone:
        new = _by_devices(_tile, new, count=len(slots))
    for at, slot in enumerate(slots):
        if slot != slots[0]:
            new = put_sequence(new, at, fitted(slot))
    return new


def _by_devices(program: Callable[..., list[jax.Array]], *states: State, **numbers: Any) -> State:
    """Run a program once for each set of devices, with lists of the states' arrays there: a draft may have its own."""
    leaves = [jax.tree.leaves(state) for state in states]
    places = defaultdict(list)
    for at, array in enumerate(leaves[0]):
        places[frozenset(array.devices())].append(at)
    new = {}
    for some in places.values():
        arrays = ([each[at] for at in some] for each in leaves)
        new |= zip(some, program(*arrays, **numbers), strict=True)
    return jax.tree.unflatten(jax.tree.structure(states[0]), [new[at] for at in range(len(leaves[0]))])


@functools.partial(jax.jit, donate_argnums=0)
def _put(state: list[jax.Array], sequence: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_update_index_in_dim(x, new, at, axis=0) for x, new in zip(state, sequence, strict=True)]


@jax.jit
def _take(state: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(x, at) for x in state]


@functools.partial(jax.jit, static_argnames="count")
def _tile(sequence: list[jax.Array], count: int) -> list[jax.Array]:
    if count == 1:
        return [jnp.array(x, copy=True) for x in sequence]
    return [jnp.broadcast_to(x, (count, *x.shape[1:])) for x in sequence]


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
