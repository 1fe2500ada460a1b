"""The running sequences: slots that share one decode state, in one group or in several of different cache lengths.

All slots of a group have the cache length of its longest sequence. A group is one pass through the model per step, so
several groups cost several passes, but short sequences do not use the memory of long ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hydrajax.decoding.constraints import Constraint
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import State
from hydrajax.decoding.state_snapshots import StateSnapshots
from hydrajax.sequences import growing_text
from hydrajax.serve.admission import GroupUsage
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.programs import ProgramShape
from hydrajax.serve.requests import RequestHandle

FEW_TOKENS = 8  # such as those of a burst of plain steps that is only measured
STEPS_AHEAD = 64  # for which programs are compiled
STEPS_BEFORE_SHRINKING = 8  # bursts for which a smaller shape must have been enough


class Extent(NamedTuple):
    """The tokens of a sequence, those that it can reach, and whether it has a constraint."""

    length: int
    max_length: int
    constrained: bool


class RunningSequence:
    """A request in a slot.

    Attributes:
        handle: the request and its result.
        max_length: tokens that it can reach.
        text: the text so far, cut at stop strings.
        constraint: the grammar's, at the end of the text; None without a grammar.
        output: tokens so far, int32.
        steps: decode steps so far.
        read: tokens of its text, from the first on, that the draft has read.
        missed: later ones that the draft has missed. A few do not matter, see `draft_is_behind`.
        snapshots: of recurrent layers, in its prompt.
    """

    def __init__(self, handle: RequestHandle, tokenizer: Any, max_length: int, snapshots: StateSnapshots):
        self.handle, self.max_length = handle, max_length
        self.text = growing_text(tokenizer, handle.request.wanted, handle.request.ids)
        self.constraint = None if handle.request.constraint is None else handle.request.constraint.copy()
        self.output, self.steps = np.zeros(0, np.int32), 0
        self.read, self.missed, self.snapshots = self.length, 0, snapshots

    @property
    def emitted(self) -> int:
        return len(self.output)

    @property
    def length(self) -> int:
        """Tokens in its KV cache."""
        return len(self.handle.request.ids) + self.emitted

    @property
    def extent(self) -> Extent:
        return Extent(self.length, self.max_length, self.constraint is not None)

    @property
    def ids(self) -> np.ndarray:
        """The tokens of prompt and answer."""
        return np.concatenate([self.handle.request.ids, self.output])

    @property
    def draft_is_behind(self) -> bool:
        return self.missed > FEW_TOKENS

    def miss(self, count: int) -> None:
        """Note that the draft misses the next tokens of the text."""
        if not self.missed:
            self.read = self.length
        self.missed += count


class SlotGroup:
    """Sequences that step together. One thread changes a group; others may read it while they hold ``lock``.

    Attributes:
        slots: None for a free slot; empty if nothing runs, and then the group has no state.
        reserved: maximum length of the sequence in prefill that will join, or None.
        cache_len: positions of each slot's KV cache.
        drafting: steps are speculative; None before the first one.
        disagreements: bursts since measurements prefer the other kind.
    """

    def __init__(self, pool: ExecutorPool, lock: threading.Condition):
        self._pool, self._lock = pool, lock
        self._state: State | None = None
        self._parked: dict[RunningSequence, State] = {}  # those that wait for the programs of a longer cache
        self.slots: list[RunningSequence | None] = []
        self.reserved: int | None = None
        self.cache_len, self._too_large = 0, 0
        self.drafting: bool | None = None
        self.disagreements = 0

    @property
    def live(self) -> list[tuple[int, RunningSequence]]:
        """The running sequences with their slots."""
        return [(slot, sequence) for slot, sequence in enumerate(self.slots) if sequence is not None]

    @property
    def stepping(self) -> list[tuple[int, RunningSequence]]:
        """The running sequences that do not wait for programs."""
        return [(slot, sequence) for slot, sequence in self.live if sequence not in self._parked]

    @property
    def constraints(self) -> list[Constraint | None]:
        """The constraint of each slot's sequence."""
        return [None if sequence is None else sequence.constraint for sequence in self.slots]

    @property
    def shape(self) -> tuple[int, int]:
        """Batch size and cache length."""
        return len(self.slots), self.cache_len

    @property
    def usage(self) -> GroupUsage:
        reserved = [] if self.reserved is None else [self.reserved]
        return GroupUsage((*(sequence.max_length for _, sequence in self.live), *reserved), self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the present shape."""
        return self._pool.shapes.nbytes(len(self.slots), self.cache_len) if self.slots else 0

    def programs_with(self, extent: Extent) -> list[ProgramShape]:
        """Return the programs of the batch in which a sequence that joins would step."""
        batch, cache_len = self._needed_with(extent)
        shape = max(batch, len(self.slots)), max(cache_len, self.cache_len)
        return self._pool.step_programs(*shape, {extent.constrained, *self._constrained})

    def join(self, state: State, sequence: RunningSequence) -> bool:
        """Let a prefilled sequence take a free slot; the group may grow.

        Returns:
            True if ``state`` was copied; False if it now belongs to the group, whose steps donate it.
        """
        self.reserved = None
        batch, cache_len = self._needed_with(sequence.extent)
        if self._state is None:
            copied = not self._pool.shapes.has(state, batch, cache_len)
            self._state = self._pool.shapes.tile(state, batch, cache_len) if copied else state
            self._set_slots([sequence] + [None] * (batch - 1), cache_len)
            return copied
        if batch > len(self.slots) or cache_len > self.cache_len:
            self._reshape(batch, cache_len)
        slot = self.slots.index(None)
        self._state = self._pool.shapes.put(self._state, slot, state, self.cache_len)
        with self._lock:
            self.slots[slot] = sequence
        return True

    def advance(self, steps: int, speculative: bool = True) -> Snapshot:
        """Take at most ``steps`` decode steps, speculative or plain, of the sequences that are `stepping`."""
        self._shrink(steps)
        steps, stopped = self.grow(steps), np.ones(len(self.slots), bool)
        stopped[[slot for slot, _ in self.stepping]] = False
        self._state, snapshot = self._pool.advance(
            self._state, self.cache_len, stopped, steps, speculative, self.constraints
        )
        return snapshot

    def catch_up(self, slot: int) -> None:
        """Let the draft read what it has missed of a sequence."""
        sequence = self.slots[slot]
        self._state = self._pool.catch_up(self._state, slot, sequence.ids, sequence.read, self.cache_len)
        sequence.missed = 0

    def remove(self, slot: int) -> None:
        self._parked.pop(self.slots[slot], None)
        with self._lock:
            self.slots[slot] = None

    def free_if_empty(self) -> None:
        if self._state is not None and not any(self.slots):
            self._clear()

    def copy_of(self, slot: int, cache_len: int) -> State:
        """Return one sequence in a state of batch size 1: a copy, or the group's own state if nothing else runs."""
        if len(self.slots) == 1 and cache_len == self.cache_len and not self.live:
            state = self._state
            self._clear()
            return state
        return self._pool.shapes.take(self._state, slot, cache_len)

    @property
    def _constrained(self) -> set[bool]:
        """True if a sequence has a constraint, False if one has none."""
        return {sequence.constraint is not None for _, sequence in self.live}

    @property
    def _extents(self) -> list[Extent]:
        return [sequence.extent for _, sequence in self.live]

    def _needed(self, extents: Sequence[Extent], steps: int) -> tuple[int, int]:
        """The smallest batch size and cache length for ``steps`` more steps."""
        growth = steps * self._pool.longest_path(any(each.constrained for each in extents))
        longest = max(min(each.length + growth, each.max_length) for each in extents)
        return self._pool.batch_for(len(extents)), self._pool.cache_len_for(longest + self._pool.headroom)

    def _needed_with(self, extent: Extent) -> tuple[int, int]:
        """The shape in which a sequence can join. Parked ones stay so."""
        here = [each.extent._replace(max_length=each.length) for each in self._parked]
        return self._needed([*(each.extent for _, each in self.stepping), *here, extent], 1)

    def _has_programs(self, shape: tuple[int, int]) -> bool:
        """Return whether the batch can step in this shape; its programs are compiled next if not."""
        return self._pool.programs.ready(self._pool.step_programs(*shape, self._constrained))

    def grow(self, steps: int) -> int:
        """Grow the cache if ``steps`` more steps need it, and return how many can be taken.

        A sequence whose next step needs a cache length without compiled programs is parked until these are compiled,
        outside the batch, whose steps would change its root. Without any other sequence the result is 0.
        """
        for count in (steps, 1):
            needed = self._needed(self._extents, count)
            if needed[1] > self.cache_len and self._has_programs(needed):
                self._reshape(*needed)
        self._has_programs(self._needed(self._extents, STEPS_AHEAD))
        left = {slot: self._steps_left(sequence.extent) for slot, sequence in self.live}
        for slot, sequence in self.live:
            if left[slot] and sequence in self._parked:
                self._state = self._pool.shapes.put(self._state, slot, self._parked.pop(sequence), self.cache_len)
            elif not left[slot] and sequence not in self._parked:
                self._parked[sequence] = self._pool.shapes.take(self._state, slot, self.cache_len)
        return min([steps, *filter(None, left.values())]) if any(left.values()) else 0

    def _steps_left(self, extent: Extent) -> int:
        """The steps for which the cache has room."""
        room, left = self.cache_len - self._pool.headroom - extent.length, extent.max_length - extent.length
        return left if left <= room else room // self._pool.longest_path(any(self.constraints))

    def _shrink(self, steps: int) -> None:
        """Shrink if a smaller shape has been enough for a while."""
        needed = self._needed(self._extents, steps)
        self._too_large = 0 if needed == self.shape or needed[1] > self.cache_len else self._too_large + 1
        if self._too_large >= STEPS_BEFORE_SHRINKING and self._has_programs(needed):
            self._reshape(*needed)

    def _reshape(self, batch: int, cache_len: int) -> None:
        """Move running sequences to the front; free slots become copies of the first one, which take no step."""
        live = [slot for slot, _ in self.live]
        order = live + [live[0] if live else 0] * (batch - len(live))
        self._state = self._pool.shapes.reshape(self._state, order, cache_len)
        self._set_slots([self.slots[slot] for slot in live] + [None] * (batch - len(live)), cache_len)

    def _clear(self) -> None:
        self._state, self.drafting, self.disagreements = None, None, 0
        self._set_slots([], 0)

    def _set_slots(self, slots: list[RunningSequence | None], cache_len: int) -> None:
        with self._lock:
            self.slots, self.cache_len, self._too_large = slots, cache_len, 0


class RunningBatch:
    """All groups. One thread changes it; others may read it while they hold ``lock``."""

    def __init__(self, pool: ExecutorPool, lock: threading.Condition):
        self._pool, self._lock = pool, lock
        self.groups: list[SlotGroup] = []

    @property
    def live(self) -> list[tuple[SlotGroup, int, RunningSequence]]:
        return [(group, slot, sequence) for group in self.groups for slot, sequence in group.live]

    @property
    def usages(self) -> list[GroupUsage]:
        return [group.usage for group in self.groups]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def group(self, index: int) -> SlotGroup:
        """Return the group with this index; the next index is a new group."""
        return self.groups[index] if index < len(self.groups) else SlotGroup(self._pool, self._lock)

    def reserve(self, group: SlotGroup, max_length: int) -> None:
        """Reserve a slot in a group, which may be new."""
        with self._lock:
            if group not in self.groups:
                self.groups.append(group)
            group.reserved = max_length

    def drop_empty(self) -> None:
        """Drop groups without running or reserved slots."""
        for group in self.groups:
            group.free_if_empty()
        with self._lock:
            self.groups = [group for group in self.groups if group.slots or group.reserved is not None]
