"""The running sequences: slots that share one decode state, in one group or in several of different cache lengths.

All slots of a group have the cache length of its longest sequence. A group is one pass through the model per step, so
several groups cost several passes, but short sequences do not use the memory of long ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrajax.decoding.constraints import Constraint
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import State
from hydrajax.generation import growing_text
from hydrajax.serve.admission import GroupUsage
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.requests import RequestHandle

FEW_TOKENS = 8  # such as those of a burst of plain steps that is only measured
STEPS_BEFORE_SHRINKING = 8  # bursts for which a smaller shape must have been enough


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
    """

    def __init__(self, handle: RequestHandle, tokenizer: Any, max_length: int):
        self.handle, self.max_length = handle, max_length
        self.text = growing_text(tokenizer, handle.request.stop, handle.request.ids)
        self.constraint = None if handle.request.constraint is None else handle.request.constraint.copy()
        self.output, self.steps = np.zeros(0, np.int32), 0
        self.read, self.missed = self.length, 0

    @property
    def emitted(self) -> int:
        return len(self.output)

    @property
    def length(self) -> int:
        """Tokens in its KV cache."""
        return len(self.handle.request.ids) + self.emitted

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

    def join(self, state: State, sequence: RunningSequence) -> bool:
        """Let a prefilled sequence take a free slot; the group may grow.

        Returns:
            True if ``state`` was copied; False if it now belongs to the group, whose steps donate it.
        """
        self.reserved = None
        batch, cache_len = self._needed([*(running for _, running in self.live), sequence], 1)
        if self._state is None:
            copied = not self._pool.shapes.has(state, batch, cache_len)
            self._state = self._pool.tile(state, batch, cache_len) if copied else state
            self._set_slots([sequence] + [None] * (batch - 1), cache_len)
            return copied
        if batch > len(self.slots) or cache_len > self.cache_len:
            self._reshape(batch, cache_len)
        slot = self.slots.index(None)
        self._state = self._pool.put(self._state, slot, state, self.cache_len)
        with self._lock:
            self.slots[slot] = sequence
        return True

    def advance(self, steps: int, speculative: bool = True) -> Snapshot:
        """Take at most ``steps`` decode steps, speculative or plain."""
        self._fit(steps)
        stopped = np.array([sequence is None for sequence in self.slots])
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
        return self._pool.take(self._state, slot, cache_len)

    def _needed(self, sequences: Sequence[RunningSequence], steps: int) -> tuple[int, int]:
        """The smallest batch size and cache length for ``steps`` more steps."""
        constrained = any(sequence.constraint for sequence in sequences)
        growth = steps * (self._pool.constrained_path if constrained else self._pool.max_path)
        longest = max(min(sequence.length + growth, sequence.max_length) for sequence in sequences)
        return self._pool.batch_for(len(sequences)), self._pool.cache_len_for(longest + self._pool.headroom)

    def _fit(self, steps: int) -> None:
        """Grow the cache at once if needed; shrink if a smaller shape has been enough for a while."""
        needed = self._needed([sequence for _, sequence in self.live], steps)
        if needed[1] > self.cache_len:
            self._reshape(*needed)
        self._too_large = self._too_large + 1 if needed != (len(self.slots), self.cache_len) else 0
        if self._too_large >= STEPS_BEFORE_SHRINKING:
            self._reshape(*needed)

    def _reshape(self, batch: int, cache_len: int) -> None:
        """Move running sequences to the front; free slots become copies of the first one, which take no step."""
        live = [slot for slot, _ in self.live]
        order = live + [live[0] if live else 0] * (batch - len(live))
        self._state = self._pool.reshape(self._state, order, cache_len)
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

    def reserve(self, index: int, max_length: int) -> SlotGroup:
        """Reserve a slot in the group with this index; the next index makes a new group."""
        with self._lock:
            if index == len(self.groups):
                self.groups.append(SlotGroup(self._pool, self._lock))
            self.groups[index].reserved = max_length
            return self.groups[index]

    def drop_empty(self) -> None:
        """Drop groups without running or reserved slots."""
        for group in self.groups:
            group.free_if_empty()
        with self._lock:
            self.groups = [group for group in self.groups if group.slots or group.reserved is not None]
