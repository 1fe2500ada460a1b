"""Whether the next steps are drafted: while that emits more tokens in a second than steps without a draft."""

from __future__ import annotations

NEWEST = 0.1  # the weight of what was seen last in a mean
TRIAL_EVERY = 40  # bursts of as many rows: what is slower is tried again, as texts and their lengths change


class Drafting:
    """What drafting brings and costs, from the steps that were taken.

    A step takes the longer the more rows it has, and with a draft the more so: a row's tree is free only while the
    device waits for the model's parameters. How many tokens a drafted step emits depends on the texts, not on the rows,
    and so does one mean for all. Outputs are the same with and without a draft, and so whichever is taken.
    """

    def __init__(self):
        self._tokens: float | None = None  # of a drafted step and row
        self._seconds: dict[tuple[int, bool], float | None] = {}  # of a step, by rows and whether it was drafted
        self._turns: dict[int, int] = {}

    def is_worth_it(self, rows: int) -> bool:
        """For the next steps of a group with so many rows in its shape."""
        drafted, plain = (self._seconds.get((rows, how)) for how in (True, False))
        if drafted is None or plain is None:
            return drafted is None
        self._turns[rows] = self._turns.get(rows, 0) + 1
        better = self._tokens * plain >= drafted
        return not better if self._turns[rows] % TRIAL_EVERY == 0 else better

    def saw(self, rows: int, drafted: bool, steps: int, seconds: float, row_steps: int, tokens: int) -> None:
        """Learn from steps that took so many seconds.

        row_steps, tokens: summed over the rows that live. The first time may be that of a compilation, and is left out.
        """
        key = rows, drafted
        if key not in self._seconds:
            self._seconds[key] = None
            return
        self._seconds[key] = _mean(self._seconds[key], seconds / steps)
        if drafted:
            self._tokens = _mean(self._tokens, tokens / row_steps)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + NEWEST * (now - before)
