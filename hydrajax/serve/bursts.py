"""Bursts of decode steps: their kind and number of steps by measured throughput.

While plain steps are faster, the draft is left out: it reads neither prompts nor the tokens of plain steps, so these
steps cost what they cost without a draft. Before speculative steps it reads what it has missed.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from hydrajax.decoding.decode_loop import BURSTS_PER_SECOND, Snapshot
from hydrajax.serve.executor_pool import ExecutorPool
from hydrajax.serve.slot_group import SlotGroup
from hydrajax.serve.speculation_policy import CONSTRAINED, SpeculationPolicy

PATIENCE = 8  # bursts before plain steps end, because the draft may have to read a lot then
WORTH_READING = 16  # tokens that a sequence must be able to reach


class Burst(NamedTuple):
    """Steps of a group.

    Attributes:
        snapshot: the output after them.
        steps: most steps of a sequence. A burst ends early if a sequence ends.
        sequence_steps, tokens: sums over the sequences.
        speculative: the kind of steps.
        candidates: of a step per sequence, 0 for plain steps.
    """

    snapshot: Snapshot
    steps: int
    sequence_steps: int
    tokens: int
    speculative: bool
    candidates: int


class BurstRunner:
    """Advance groups, and measure what their steps take."""

    def __init__(self, pool: ExecutorPool):
        self._pool, self.policy = pool, SpeculationPolicy()

    def drafts(self, group: SlotGroup, coming: int = 0) -> bool:
        """Return whether the group's steps are speculative, so that the draft should read a prompt that joins it.

        Args:
            group: the group.
            coming: sequences that will join it.
        """
        if not self._pool.drops_draft:
            return True
        sequences = min(len(group.live) + coming, self._pool.sizes.slots)
        preferred = self.policy.prefers(max(len(group.slots), self._pool.batch_for(sequences)))
        # To leave the draft out costs nothing.
        return preferred is not False and group.drafting is not False

    def single_step(self, group: SlotGroup, coming: int) -> Burst:
        """Take one step, after which a prompt can be prefilled or a first token be sent."""
        return self._advance(group, 1, self.drafts(group, coming) or not self._pool.can_be_plain(*group.shape))

    def run(self, group: SlotGroup, n_groups: int, has_room: Callable[[int], bool]) -> Burst:
        """Take the steps of a burst.

        Args:
            group: its sequences step.
            n_groups: that take turns within a burst's time.
            has_room: returns True if the memory suffices to prefill this number of tokens.
        """
        shape, seconds = group.shape, 1 / (BURSTS_PER_SECOND * n_groups)
        speculative, steps = self._next(group, seconds)
        if speculative:
            self._catch_up(group, has_room)
        behind = any(sequence.draft_is_behind for _, sequence in group.live)
        constrained = any(group.constraints)
        start = time.perf_counter()
        burst = self._advance(group, steps, speculative)
        seconds = (time.perf_counter() - start) / burst.steps
        # Other steps took the time of a move too.
        if constrained:
            self.policy.record(shape[0], CONSTRAINED, seconds, steps=burst.steps)
        elif shape == group.shape:
            tokens = burst.tokens / (burst.steps * len(group.stepping)) if speculative and not behind else None
            self.policy.record(shape[0], speculative, seconds, tokens, burst.steps)
        return burst

    def _next(self, group: SlotGroup, seconds: float) -> tuple[bool, int]:
        """Return the kind and the number of the next steps."""
        batch, drafting = len(group.slots), self.drafts(group)
        if any(group.constraints):
            return True, self.policy.steps(batch, CONSTRAINED, seconds)
        if not self._pool.can_be_plain(*group.shape):
            return True, self.policy.steps(batch, True, seconds)
        group.disagreements = group.disagreements + 1 if self.policy.prefers(batch) and not drafting else 0
        if group.disagreements >= PATIENCE:
            drafting, group.disagreements = True, 0
        group.drafting = drafting
        return self.policy.next_burst(batch, drafting, seconds)

    def _catch_up(self, group: SlotGroup, has_room: Callable[[int], bool]) -> None:
        """Let the draft read what it has missed of sequences that are not about to end."""
        for slot, sequence in group.stepping:
            left = sequence.max_length - sequence.length
            if sequence.draft_is_behind and left >= WORTH_READING and has_room(sequence.length):
                start = self._pool.read_from(sequence.read, sequence.length)
                if self._pool.programs.ready(self._pool.prefill_programs(start, sequence.length)):
                    group.catch_up(slot)

    def _advance(self, group: SlotGroup, steps: int, speculative: bool) -> Burst:
        speculative |= any(group.constraints)
        snapshot = group.advance(steps, speculative)
        taken = [int(snapshot.steps[slot]) - sequence.steps for slot, sequence in group.stepping]
        emitted = [int(snapshot.lengths[slot]) - sequence.emitted for slot, sequence in group.stepping]
        if not speculative:
            for (_, sequence), count in zip(group.stepping, emitted, strict=True):
                sequence.miss(count)
        candidates = self._pool.candidates(len(group.slots), any(group.constraints)) if speculative else 0
        return Burst(snapshot, max(*taken, 1), sum(taken), sum(emitted), speculative, candidates)
