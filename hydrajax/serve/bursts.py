"""Bursts of decode steps: their kind and number of steps by measured throughput."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hydrajax.decoding.decode_loop import BURSTS_PER_SECOND, Snapshot
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.slot_group import SlotGroup
from hydrajax.serve.speculation_policy import SpeculationPolicy


@dataclass(frozen=True)
class Burst:
    """The steps that a group has taken.

    Attributes:
        snapshot: the output after them.
        speculative_steps: sum over its sequences.
    """

    snapshot: Snapshot
    speculative_steps: int


class BurstRunner:
    """Advance groups, and measure what their steps take."""

    def __init__(self, pool: ExecutorPool):
        self._pool, self._policy = pool, SpeculationPolicy()

    def single_step(self, group: SlotGroup) -> Burst:
        """Take one step, after which a prompt can be prefilled or a first token be sent."""
        can_be_plain = self._pool.can_be_plain(*group.shape)
        return self._advance(group, 1, self._policy.is_worth_it(len(group.slots), can_be_plain))[0]

    def run(self, group: SlotGroup, n_groups: int) -> Burst:
        """Take the steps of a burst.

        Args:
            group: its sequences step.
            n_groups: that take turns within a burst's time.
        """
        shape, batch, seconds = group.shape, len(group.slots), 1 / (BURSTS_PER_SECOND * n_groups)
        if constrained := any(group.constraints):
            speculative, steps = True, self._policy.constrained_steps(batch, seconds)
        else:
            speculative, steps = self._policy.next_burst(batch, seconds, self._pool.can_be_plain(*shape))
        compiled = constrained or self._pool.is_compiled(*shape, speculative)
        start = time.perf_counter()
        burst, taken, emitted = self._advance(group, steps, speculative)
        # Other steps took the time of a compilation or of a move too, and single ones mostly return to the host.
        if compiled and shape == group.shape:
            # A burst ends early if all its sequences end, so count the steps taken.
            steps, seconds = max(*taken, 1), time.perf_counter() - start
            if constrained:
                self._policy.record_constrained(batch, steps, seconds)
            else:
                self._policy.record(batch, speculative, steps, seconds, max(sum(taken), 1), emitted)
        return burst

    @staticmethod
    def _advance(group: SlotGroup, steps: int, speculative: bool) -> tuple[Burst, list[int], int]:
        """Return also the steps of each sequence, and the number of all new tokens."""
        snapshot = group.advance(steps, speculative)
        taken = [int(snapshot.steps[slot]) - sequence.steps for slot, sequence in group.live]
        emitted = sum(int(snapshot.lengths[slot]) - sequence.emitted for slot, sequence in group.live)
        return Burst(snapshot, sum(taken) * speculative), taken, emitted
