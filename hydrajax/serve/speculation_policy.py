"""Choose between speculative and plain steps by measured throughput."""

from __future__ import annotations

import math

SMOOTHING = 0.1  # weight of the newest value in the running means
PROBE_SMOOTHING = 0.5  # the same for the slower kind of step, which is rarely measured
# Bursts of a batch size after which the slower kind of step is measured again. Each probe that changes nothing doubles
# the number: the first measurements are of few steps, and later probes only follow slow changes.
FIRST_PROBE, PROBE_EVERY = 5, 160
FEWEST_STEPS = 2  # of a burst: a single step would mostly measure the return to the host
CONSTRAINED = "constrained"  # the kind of steps under grammars
# Speculative steps begin at the first gain and end below the second. Small gains are lost in the draft's prefill, in
# moves of its state, and in slots of sequences that end early in a burst: 3% with eight sequences.
BEGIN, END = 1.06, 1.03


class SpeculationPolicy:
    """Running means of a step's seconds and of a speculative step's tokens.

    Both depend on the batch size: a tree costs little only while the device waits for the parameters, and larger
    batches have smaller trees. Both kinds of steps emit the same tokens.
    """

    def __init__(self):
        self._tokens: dict[int, float] = {}  # per speculative step and sequence, by batch size
        self._seconds: dict[tuple[int, bool | str], float | None] = {}  # of a step, by batch size and kind
        self._better: dict[int, bool] = {}
        self._bursts: dict[int, int] = {}  # since the last probe
        self._probe_every: dict[int, int] = {}

    def is_worth_it(self, batch_size: int, can_be_plain: bool = True) -> bool:
        """Return whether steps at this batch size should be speculative."""
        if not can_be_plain:
            return True
        speculative, plain = (self._seconds.get((batch_size, kind)) for kind in (True, False))
        if speculative is None or plain is None:
            return speculative is None
        gain, last = self._tokens[batch_size] * plain / speculative, self._better.get(batch_size)
        better = gain >= (END if last else BEGIN)
        if better != last:
            self._better[batch_size], self._bursts[batch_size] = better, 0
            self._probe_every[batch_size] = FIRST_PROBE
        return better

    def next_burst(self, batch_size: int, seconds: float, can_be_plain: bool = True) -> tuple[bool, int]:
        """Return whether the next burst is speculative, and its steps: the fewest until their time is known.

        Args:
            batch_size: of the group.
            seconds: that the burst may take. Bursts of both kinds take as long, so that returning to the host counts
                equally.
            can_be_plain: plain steps are compiled.
        """
        kind = self.is_worth_it(batch_size, can_be_plain)
        if can_be_plain and batch_size in self._better:
            self._bursts[batch_size] += 1
            if self._bursts[batch_size] > (every := self._probe_every[batch_size]):
                self._bursts[batch_size], self._probe_every[batch_size] = 0, min(2 * every, PROBE_EVERY)
                kind = not kind
        return kind, self._steps(batch_size, kind, seconds)

    def constrained_steps(self, batch_size: int, seconds: float) -> int:
        """Return the steps of a burst under grammars, see `next_burst`."""
        return self._steps(batch_size, CONSTRAINED, seconds)

    def _steps(self, batch_size: int, kind: bool | str, seconds: float) -> int:
        known = self._seconds.get((batch_size, kind))
        return FEWEST_STEPS if known is None else max(math.ceil(seconds / known), FEWEST_STEPS)

    def record(
        self, batch_size: int, speculative: bool, steps: int, seconds: float, sequence_steps: int, tokens: int
    ) -> None:
        """Record a burst of ``steps``; ``sequence_steps`` and ``tokens`` are sums over its sequences.

        The first burst of each kind is left out, as it may include a compilation.
        """
        weight = PROBE_SMOOTHING if self._better.get(batch_size, speculative) != speculative else SMOOTHING
        if self._record_seconds(batch_size, speculative, seconds / steps, weight) and speculative:
            self._tokens[batch_size] = _smoothed(self._tokens.get(batch_size), tokens / sequence_steps, weight)

    def record_constrained(self, batch_size: int, steps: int, seconds: float) -> None:
        """Record a burst under grammars, see `record`."""
        self._record_seconds(batch_size, CONSTRAINED, seconds / steps, SMOOTHING)

    def _record_seconds(self, batch_size: int, kind: bool | str, of_step: float, weight: float) -> bool:
        """Return False if it was the first burst of its kind."""
        key = batch_size, kind
        if first := key not in self._seconds:
            self._seconds[key] = None
        else:
            self._seconds[key] = _smoothed(self._seconds[key], of_step, weight)
        return not first


def _smoothed(mean: float | None, value: float, weight: float) -> float:
    return value if mean is None else mean + weight * (value - mean)
