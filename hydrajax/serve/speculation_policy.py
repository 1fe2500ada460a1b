"""Choose between speculative and plain steps by measured throughput."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

SMOOTHING = 0.1  # weight of the newest value in the running means
PROBE_SMOOTHING = 0.5  # the same for the slower kind of step, which is rarely measured
ENOUGH = 3  # bursts of each kind before they are compared
# Speculative steps, times sequences, before their tokens count: of large models a burst has two or three steps, and the
# first ones of a text may all be rejected.
ENOUGH_STEPS = 32
# Bursts of a batch size after which the slower kind of step is measured again. Each probe that changes nothing doubles
# the number: the first measurements are of few steps, and later probes only follow slow changes. A probe of
# speculative steps also costs the time in which the draft reads what it has missed.
FIRST_PROBE, PROBE_EVERY = {False: 5, True: 160}, {False: 160, True: 1280}
FEWEST_STEPS = 2  # of a burst: a single step would mostly measure the return to the host
PROBE_STEPS = 8  # at most, of plain steps: tokens that the draft misses
CONSTRAINED = "constrained"  # the kind of steps under grammars
# Speculative steps begin at the first gain and end below the second, for one sequence and for several. Small gains of
# several are lost in single steps while prompts are prefilled, and in what the draft reads after plain steps; the means
# of a busy machine are off by 5%.
ALONE, TOGETHER = (1.06, 1.03), (1.12, 1.08)
LOST = 0.9  # gains on an idle device below which speculative steps are not measured


@dataclass
class _Mean:
    """A running mean of values, each of several units. The first is left out, as it may include a compilation.

    Long bursts count more than those that end early, whose steps share the return to the host with few others.

    Attributes:
        count: values in the mean.
        recorded: units of all values, the first one's too.
    """

    count: int = -1
    recorded: float = 0.0
    total: float = 0.0
    units: float = 0.0

    @property
    def value(self) -> float | None:
        return self.total / self.units if self.units else None

    def add(self, value: float, weight: float, units: float = 1.0) -> None:
        self.count += 1
        self.recorded += units
        if self.count:
            weight = max(weight, 1 / self.count)
            self.total += weight * (value * units - self.total)
            self.units += weight * (units - self.units)


class IdleTimes(NamedTuple):
    """Times while no request runs.

    Attributes:
        steps: seconds of a step by batch size and kind, True for speculative ones.
        reading: seconds that the draft takes to read a token of a prompt.
    """

    steps: dict[tuple[int, bool], float]
    reading: float


class SpeculationPolicy:
    """Running means of a step's seconds and of a speculative step's tokens.

    Both depend on the batch size: a tree costs little only while the device waits for the parameters, and larger
    batches have smaller trees. Both kinds of steps emit the same tokens.

    Attributes:
        idle: times of steps until these are measured, and the time of reading.
    """

    def __init__(self):
        self.idle = IdleTimes({}, 0.0)
        self._prompt, self._answer = _Mean(count=0), _Mean(count=0)  # tokens
        self._tokens: dict[int, _Mean] = defaultdict(_Mean)  # by batch size: per speculative step and sequence
        # Of a step, by batch size and kind.
        self._seconds: dict[tuple[int, bool | str], _Mean] = defaultdict(_Mean)
        self._better: dict[int, bool] = {}
        self._bursts: dict[int, int] = {}  # since the last probe
        self._probe_every: dict[int, int] = {}

    def prefers(self, batch_size: int) -> bool | None:
        """Return whether steps at this batch size should be speculative; None if that must be measured."""
        means = [self._seconds[batch_size, kind] for kind in (True, False)]
        if measured := min(mean.count for mean in means) >= ENOUGH:
            seconds = [mean.value for mean in means]
        else:
            seconds = [self.idle.steps.get((batch_size, kind)) for kind in (True, False)]
        if None in seconds or (gain := self._gain(batch_size, *seconds)) is None or (not measured and gain >= LOST):
            return None
        last = self._better.get(batch_size)
        begin, end = ALONE if batch_size == 1 else TOGETHER
        better = gain >= (end if last else begin)
        if better != last:
            self._better[batch_size], self._bursts[batch_size] = better, 0
            self._probe_every[batch_size] = FIRST_PROBE[not better]
        return better

    def _gain(self, batch_size: int, speculative: float, plain: float) -> float | None:
        """The throughput of speculative steps and of the draft's prefill over that of plain steps."""
        # Larger batches have smaller trees, so the tokens of a smaller one are the most that can be expected.
        known = {size: mean.value for size, mean in self._tokens.items() if size <= batch_size and self._counts(size)}
        if not known:
            return None
        reading = 0.0
        if self._answer.value:  # seconds per token of an answer, for each of which the batch takes as many steps
            reading = self.idle.reading * batch_size * self._prompt.value / self._answer.value
        return plain / (speculative / known[max(known)] + reading)

    def _counts(self, batch_size: int) -> bool:
        """Return whether the tokens of speculative steps at this batch size are known."""
        tokens = self._tokens[batch_size]
        return tokens.value is not None and tokens.recorded * batch_size >= ENOUGH_STEPS

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
            if self._seconds[batch_size, kind].count >= ENOUGH and (not kind or self._counts(batch_size)):
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
        known = self._seconds[batch_size, kind].value or self.idle.steps.get((batch_size, kind))
        return FEWEST_STEPS if known is None else max(math.ceil(seconds / known), FEWEST_STEPS)

    def record(
        self, batch_size: int, kind: bool | str, seconds: float, tokens: float | None = None, steps: int = 1
    ) -> None:
        """Record a burst.

        Args:
            batch_size: of the group.
            kind: True for speculative steps, False for plain ones, or `CONSTRAINED`.
            seconds: of a step.
            tokens: per speculative step and sequence; None if the draft had not read the text. Plain steps count as
                one token.
            steps: of the burst.
        """
        weight = PROBE_SMOOTHING if self._better.get(batch_size, kind) != kind else SMOOTHING
        self._seconds[batch_size, kind].add(seconds, weight, steps)
        if tokens is not None:
            self._tokens[batch_size].add(tokens, weight, steps)

    def answered(self, prompt: int, answer: int) -> None:
        """Record the tokens of an answer, and those of its prompt that were prefilled."""
        self._prompt.add(prompt, SMOOTHING)
        self._answer.add(answer, SMOOTHING)
