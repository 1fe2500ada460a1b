"""Move sequences between decode states: join a batch, leave it, and change its shape.

Axis 0 of every array of a state is the batch, and the KV caches also have an axis of positions. Sequences are moved one
by one: take one out, cut or pad it to the new cache length, put it in. So there is no program per pair of shapes but a
few small ones per shape, which can all be compiled at the start. A program moves all arrays of a sequence, because each
call costs more than a small copy. A change of shape moves few large arrays at a time, because old and new ones exist
together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.request import SamplingParams
from hydrajax.models.cache import states_of

MOVED_TOGETHER = 128 << 20  # bytes that exist twice while a batch changes its shape, unless one array is larger


class StateShapes:
    """The shapes of an executor's states by batch size and cache length.

    A sequence with another cache length is rewound to its present length (`hydrajax.drafters.drafter.Drafter.rewind`);
    `gather` and `take` leave that to the caller.
    """

    def __init__(self, executor: Executor, sampling: SamplingParams, largest: tuple[int, int], snapshots: int = 0):
        """Build the shapes.

        Args:
            executor: makes the states.
            sampling: of any request.
            largest: the largest batch size and cache length.
            snapshots: of its recurrent layers that each sequence may keep; `nbytes` counts them.
        """
        self._stay = executor.stay
        self._state = functools.cache(lambda batch, cache_len: executor.abstract_state(batch, cache_len, sampling))
        # The same parts for all shapes, so that their programs are few.
        self._parts = _parts([_bytes_of(x) for x in jax.tree.leaves(self._state(*largest))])
        states = states_of(executor.target(self._state(1, largest[1])).target.cache) if snapshots else ()
        self._kept = snapshots * sum(map(_bytes_of, jax.tree.leaves(states)))
        self.nbytes = functools.cache(self._nbytes)  # asked for several times in every iteration of the batcher

    def _nbytes(self, batch: int, cache_len: int) -> int:
        return batch * self._kept + sum(map(_bytes_of, jax.tree.leaves(self._state(batch, cache_len))))

    def has(self, state: State, batch: int, cache_len: int) -> bool:
        """Return whether a state has this batch size and cache length."""
        wanted = self._state(batch, cache_len)
        return all(jax.tree.leaves(jax.tree.map(lambda x, like: x.shape == like.shape, state, wanted)))

    def gather(self, state: State, slots: Sequence[int], cache_len: int) -> State:
        """Copy the given slots into a new state, in that order; only the first slot may be repeated."""
        return _gather(state, slots, self._state(len(slots), cache_len))

    def take(self, state: State, slot: int, cache_len: int) -> State:
        """Copy one slot into a state of batch size 1; rewind it before use."""
        return self.gather(state, [slot], cache_len)

    def tile(self, state: State, batch: int, cache_len: int) -> State:
        """Copy a state of batch size 1 into every slot of a new batch."""
        return self._stay(self.gather(state, [0] * batch, cache_len))

    def fitted(self, sequence: State, cache_len: int) -> State:
        """Return a state of batch size 1 with this cache length: the given one, or a copy."""
        return sequence if self.has(sequence, 1, cache_len) else self.tile(sequence, 1, cache_len)

    def put(self, state: State, slot: int, sequence: State, cache_len: int) -> State:
        """Copy a state of batch size 1 into a slot of ``state``, which has this cache length and is donated."""
        return put_sequence(state, slot, self.fitted(sequence, cache_len))

    def reshape(self, state: State, slots: Sequence[int], cache_len: int) -> State:
        """Move the given slots of ``state`` into a batch of another shape.

        Old arrays are deleted after their copy, so that at most `MOVED_TOGETHER` bytes exist twice.
        """
        leaves, treedef = jax.tree.flatten(state)
        wanted = jax.tree.leaves(self._state(len(slots), cache_len))
        for few in self._parts:
            old = leaves[few]
            leaves[few] = _gather(old, slots, wanted[few])
            for array in old:
                array.delete()
        return self._stay(jax.tree.unflatten(treedef, leaves))


def _bytes_of(like: jax.ShapeDtypeStruct) -> int:
    return math.prod(like.shape) * like.dtype.itemsize


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Split sizes in bytes into runs of at most `MOVED_TOGETHER`; a larger size is a run of its own."""
    starts, total = [0], 0
    for at, size in enumerate(sizes):
        if total + size > MOVED_TOGETHER and at > starts[-1]:
            starts, total = [*starts, at], 0
        total += size
    return [slice(*ends) for ends in itertools.pairwise([*starts, len(sizes)])]


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
