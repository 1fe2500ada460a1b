"""Choose between speculative and plain steps by measured throughput."""

from __future__ import annotations

SMOOTHING = 0.1  # weight of the newest value in the running means
PROBE_EVERY = 40  # bursts of a batch size after which the slower kind of step is measured again


class SpeculationPolicy:
    """Running means of a step's seconds and of a speculative step's tokens.

    The seconds depend on the batch size, because a tree costs little only while the device waits for the parameters.
    The tokens per step depend on the sequences alone and have one mean for all batch sizes. Both kinds of steps emit
    the same tokens.
    """

    def __init__(self):
        self._tokens: float | None = None  # per speculative step and sequence
        self._seconds: dict[tuple[int, bool], float | None] = {}  # of a step, by batch size and kind
        self._bursts: dict[int, int] = {}

    def is_worth_it(self, batch_size: int) -> bool:
        """Return whether the next steps at this batch size should be speculative."""
        speculative, plain = (self._seconds.get((batch_size, kind)) for kind in (True, False))
        if speculative is None or plain is None:
            return speculative is None
        self._bursts[batch_size] = self._bursts.get(batch_size, 0) + 1
        better = self._tokens * plain >= speculative
        return not better if self._bursts[batch_size] % PROBE_EVERY == 0 else better

    def record(
        self, batch_size: int, speculative: bool, steps: int, seconds: float, sequence_steps: int, tokens: int
    ) -> None:
        """Record a burst of ``steps``; ``sequence_steps`` and ``tokens`` are sums over its sequences.

        The first burst of each kind is left out, as it may include a compilation.
        """
        key = batch_size, speculative
        if key not in self._seconds:
            self._seconds[key] = None
            return
        self._seconds[key] = _smoothed(self._seconds[key], seconds / steps)
        if speculative:
            self._tokens = _smoothed(self._tokens, tokens / sequence_steps)


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + SMOOTHING * (value - mean)
