"""Choose between speculative and plain steps by measured throughput."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest value in the running means
PROBE_SMOOTHING = 0.5  # the same for the slower kind of step, which is rarely measured
ENOUGH = 3  # bursts of each kind before they are compared
# Bursts of a batch size after which the slower kind of step is measured again. Each probe that changes nothing doubles
# the number: the first measurements are of few steps, and later probes only follow slow changes. A probe of
# speculative steps also costs the time in which the draft reads what it has missed.
FIRST_PROBE, PROBE_EVERY = {False: 5, True: 40}, {False: 160, True: 640}
FEWEST_STEPS = 2  # of a burst: a single step would mostly measure the return to the host
PROBE_STEPS = 8  # at most, of plain steps: tokens that the draft misses
CONSTRAINED = "constrained"  # the kind of steps under grammars
# Speculative steps begin at the first gain and end below the second. Small gains are lost in the draft's prefill, in
# moves of its state, and in slots of sequences that end early in a burst: 3% with eight sequences.
BEGIN, END = 1.06, 1.03


@dataclass
class _Mean:
    """A running mean. The first value is left out, as it may include a compilation."""

    value: float | None = None
    count: int = -1

    def add(self, value: float, weight: float) -> None:
        self.count += 1
        if self.count:
            weight = max(weight, 1 / self.count)
            self.value = value if self.value is None else self.value + weight * (value - self.value)


class SpeculationPolicy:
    """Running means of a step's seconds and of a speculative step's tokens.

    Both depend on the batch size: a tree costs little only while the device waits for the parameters, and larger
    batches have smaller trees. Both kinds of steps emit the same tokens.
    """

    def __init__(self):
        self._tokens: dict[int, _Mean] = defaultdict(_Mean)  # per speculative step and sequence, by batch size
        self._seconds: dict[tuple[int, bool | str], _Mean] = defaultdict(_Mean)  # of a step, by batch size and kind
        self._better: dict[int, bool] = {}
        self._bursts: dict[int, int] = {}  # since the last probe
        self._probe_every: dict[int, int] = {}

    def prefers(self, batch_size: int) -> bool | None:
        """Return whether steps at this batch size should be speculative; None until both kinds are measured."""
        if min(self._seconds[batch_size, kind].count for kind in (True, False)) < ENOUGH:
            return None
        if (tokens := self._tokens[batch_size].value) is None:
            return None
        speculative, plain = (self._seconds[batch_size, kind].value for kind in (True, False))
        last = self._better.get(batch_size)
        better = tokens * plain / speculative >= (END if last else BEGIN)
        if better != last:
            self._better[batch_size], self._bursts[batch_size] = better, 0
            self._probe_every[batch_size] = FIRST_PROBE[not better]
        return better

    def next_burst(self, batch_size: int, speculative: bool, seconds: float) -> tuple[bool, int]:
        """Return whether the next burst is speculative, and its steps: the fewest until their time is known.

        Args:
            batch_size: of the group.
            speculative: the kind of its steps at present, unless the other kind is to be measured.
            seconds: that the burst may take. Bursts of both kinds take as long, so that returning to the host counts
                equally.
        """
        kind = speculative
        if (better := self.prefers(batch_size)) is None:
            if self._seconds[batch_size, kind].count >= ENOUGH:
                kind = not kind
        elif better == speculative:
            self._bursts[batch_size] += 1
            if self._bursts[batch_size] > (every := self._probe_every[batch_size]):
                kind = not kind
                self._bursts[batch_size], self._probe_every[batch_size] = 0, min(2 * every, PROBE_EVERY[kind])
        steps = self.steps(batch_size, kind, seconds)
        return kind, min(steps, PROBE_STEPS) if speculative and not kind else steps

    def steps(self, batch_size: int, kind: bool | str, seconds: float) -> int:
        """Return the steps of a burst of this kind (see `record`), the fewest until their time is known."""
        known = self._seconds[batch_size, kind].value
        return FEWEST_STEPS if known is None else max(math.ceil(seconds / known), FEWEST_STEPS)

    def record(self, batch_size: int, kind: bool | str, seconds: float, tokens: float | None = None) -> None:
        """Record a burst.

        Args:
            batch_size: of the group.
            kind: True for speculative steps, False for plain ones, or `CONSTRAINED`.
            seconds: of a step.
            tokens: of a speculative step and sequence; None if the draft had not read the text.
        """
        weight = PROBE_SMOOTHING if self._better.get(batch_size, kind) != kind else SMOOTHING
        self._seconds[batch_size, kind].add(seconds, weight)
        if tokens is not None:
            self._tokens[batch_size].add(tokens, weight)
