"""Choose the steps of the next burst: the choice with the most expected tokens per second of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.scheduling.acceptance import Acceptance, SequenceAcceptance
from hydrajax.scheduling.choices import CATCH_UP, StepChoice
from hydrajax.scheduling.step_costs import Shape, StepCosts

PROBE_SHARE = 0.01  # of the time so far that probes of other choices may have cost
PROBE_EVERY = 20  # bursts of a batch size between two probes
PROBE_STEPS = 4
STEPS_TO_COME = 40  # over which the time to catch up is spread
MARGIN = 1.03  # the last choice stays unless another one is better by this factor


class Chosen(NamedTuple):
    """The steps of a burst.

    Attributes:
        choice: Index of the choice.
        most_steps: At most this many steps; None for as many as the caller wants.
        rate: Expected tokens per second; NaN if unknown.
        best: That of the best choice: larger than ``rate`` in a probe.
    """

    choice: int
    most_steps: int | None = None
    rate: float = float("nan")
    best: float = float("nan")


class Report(NamedTuple):
    """The state of a chooser.

    Attributes:
        bursts: By choice.
        probes: Bursts that tried another choice.
        lost: Seconds that probes have cost.
        costs: Seconds of a step by choice, batch size and cache length.
        rates: Probability that a draft token is accepted if the one before is, by choice and depth.
    """

    bursts: dict[str, int]
    probes: int
    lost: float
    costs: dict[tuple[str, int, int], float]
    rates: dict[tuple[str, int], float]


class Chooser:
    """Chooses for groups of sequences that step together. One thread uses it.

    All sequences of a group take the same choice. What each has accepted so far counts in the group's sum.

    The costs of other choices and the acceptance of drafts go out of date while they are not used. So the choice that
    was used least recently is tried now and then for `PROBE_STEPS` steps, if the time that all probes have lost stays
    within `PROBE_SHARE` of the time of all steps.
    """

    def __init__(self, choices: Sequence[StepChoice], costs: StepCosts, waiting_costs: StepCosts | None = None):
        """Build the chooser.

        Args:
            choices: The ways to take a step.
            costs: Their seconds; `record` adds to them.
            waiting_costs: Seconds in which a draft catches up (`CATCH_UP`) that has missed steps.
        """
        self.choices, self.costs = tuple(choices), costs
        self._waiting_costs = waiting_costs or StepCosts()
        self.acceptance = Acceptance(self.choices)
        self.used = np.zeros(len(self.choices), int)  # bursts
        self.probes, self.seconds, self.lost = 0, 0.0, 0.0
        self._last: dict[int, int] = {}  # choice by batch size
        self._tried: dict[int, np.ndarray] = {}  # the burst in which each choice was last used, by batch size
        self._bursts: dict[int, int] = {}  # by batch size
        self._probed: dict[int, int] = {}

    def choose(
        self,
        shape: Shape,
        sequences: Sequence[SequenceAcceptance],
        available: Sequence[int],
        draft_waits: bool = False,
    ) -> Chosen:
        """Return the choice for the next burst.

        Args:
            shape: Batch size and cache length.
            sequences: The running sequences.
            available: Indices of the possible choices, the most wanted first.
            draft_waits: The draft has missed the last steps and must catch up before it drafts.
        """
        if len(available) == 1:
            return Chosen(available[0])
        batch = shape[0]
        now = self._bursts[batch] = self._bursts.get(batch, 0) + 1
        tried = self._tried.setdefault(batch, np.zeros(len(self.choices), int))
        seconds = [self.costs.seconds(shape, self.choices[each]) for each in available]
        if None in seconds:
            return Chosen(available[0])
        drafts = [self.choices[each].drafts for each in available]
        catching_up = self._waiting_costs.seconds(shape, CATCH_UP) or 0.0
        waits = catching_up * draft_waits / STEPS_TO_COME
        tokens = self.acceptance.expected_tokens(sequences)[list(available)]
        rates = tokens / (np.array(seconds) + waits * np.array(drafts))
        best = int(np.argmax(rates))
        last = self._last.get(batch)
        if last in available and rates[best] < MARGIN * rates[available.index(last)]:
            best = available.index(last)
        found, rate = available[best], float(rates[best])
        others = [at for at in range(len(available)) if at != best]
        candidate = min(others, key=lambda at: tried[available[at]])
        loses = max(PROBE_STEPS * (seconds[candidate] - float(tokens[candidate]) / rate), 0.0)
        # Before a step with the draft, or after one without it.
        waits = catching_up * (drafts[candidate] != drafts[best])
        due = now - max(self._probed.get(batch, 0), int(tried[available[candidate]])) >= PROBE_EVERY
        if due and self.lost + loses + waits <= PROBE_SHARE * self.seconds:
            self._probed[batch] = int(now)
            tried[available[candidate]] = now
            self.probes += 1
            self.lost += waits
            return Chosen(available[candidate], PROBE_STEPS, float(rates[candidate]), rate)
        self._last[batch] = found
        tried[found] = now
        return Chosen(found, None, rate, rate)

    def last_drafts(self, batch: int) -> bool | None:
        """Return whether the last choice for this batch size drafts; None if there was none. Probes do not count."""
        last = self._last.get(batch)
        return None if last is None else self.choices[last].drafts

    def record(
        self,
        chosen: Chosen,
        shape: Shape,
        seconds: float,
        steps: int,
        sequences: Sequence[SequenceAcceptance],
        accept_lengths: Int[np.ndarray, "B S"],
        tokens: int,
        *,
        timed: bool = True,
    ) -> None:
        """Record a burst.

        Args:
            chosen: What `choose` returned.
            shape: Batch size and cache length.
            seconds: Of the burst.
            steps: Steps taken.
            sequences: The sequences that ran.
            accept_lengths: Accepted draft tokens of each step; -1 for a step that is not to be counted.
            tokens: Emitted by all sequences.
            timed: The seconds are those of the steps alone, without a compilation or a move of the sequences.
        """
        self.used[chosen.choice] += 1
        self.acceptance.record(chosen.choice, sequences, accept_lengths)
        if not timed:
            return
        self.seconds += seconds
        if chosen.most_steps is not None:
            self.lost += max(seconds - tokens / chosen.best, 0.0)
        self.costs.record(shape, self.choices[chosen.choice], seconds / steps)

    def report(self) -> Report:
        """Return the present state; any thread may call this."""
        names, rates = [choice.name for choice in self.choices], self.acceptance.rates()
        return Report(
            dict(zip(names, self.used.tolist(), strict=True)),
            self.probes,
            self.lost,
            {(choice.name, *shape): seconds for shape, choice, seconds in self.costs.rows()},
            {
                (choice.name, depth + 1): float(row[depth])
                for choice, row in zip(self.choices, rates, strict=True)
                for depth in range(choice.depth)
            },
        )
