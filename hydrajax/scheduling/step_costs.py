"""The measured seconds of a step, by batch size, cache length and choice."""

from __future__ import annotations

import threading

import numpy as np

from hydrajax.scheduling.choices import StepChoice

WINDOW = 10  # a mean forgets as if it were of this many values
STALE = 0.97  # and a mean that is not used counts for fewer, by this factor for each value of another shape or choice
OUTLIER = 3.0  # a value counts at most as this multiple of the mean, such as that of a step during a compilation
RIDGE = 1e-3
Shape = tuple[int, int]  # batch size and cache length


class StepCosts:
    """Running means of a step's seconds, from steps that are run anyway; shapes not yet seen are interpolated.

    Thread-safe: a warm-up may record on one thread while another decodes.
    """

    def __init__(self):
        # Mean, number of values that it counts for, and the number of all values when the last one came.
        self._means: dict[tuple[Shape, StepChoice], tuple[float, float, int]] = {}
        self._total = 0
        self._fit: np.ndarray | None = None
        self._lock = threading.Lock()

    def record(self, shape: Shape, choice: StepChoice, seconds: float) -> None:
        """Add the mean seconds of a burst's steps. Later values quickly replace the first one of a shape."""
        key = shape, choice
        with self._lock:
            is_new = key not in self._means
            mean, count, last = self._means.get(key, (seconds, 0.0, 0))
            count = min(count * STALE ** (self._total - last) + 1, WINDOW)
            self._total += 1
            self._means[key] = mean + (min(seconds, OUTLIER * mean) - mean) / count, count, self._total
            if is_new:
                self._fit = None

    def measured(self, shape: Shape, choice: StepChoice) -> float | None:
        found = self._means.get((shape, choice))
        return None if found is None else found[0]

    def seconds(self, shape: Shape, choice: StepChoice) -> float | None:
        """Return the expected seconds of a step; None before anything was measured.

        Unseen shapes are affine in the rows and in the rows times nodes, of a draft's steps with terms of their own. A
        step costs at least as much as one with less of everything, and at most as much as one with more.
        """
        if (found := self.measured(shape, choice)) is not None:
            return found
        with self._lock:
            if not self._means:
                return None
            if self._fit is None:
                self._fit = self._fitted()
            guess = float(_features(shape, choice) @ self._fit)
            mine = _sizes(shape, choice)
            low = [mean for key, (mean, *_) in self._means.items() if _at_most(_sizes(*key), mine)]
            high = [mean for key, (mean, *_) in self._means.items() if _at_most(mine, _sizes(*key))]
        return max(min(guess, *high, np.inf), *low, 0.0)

    def rows(self) -> list[tuple[Shape, StepChoice, float]]:
        """Return all means, for reports."""
        with self._lock:
            return [(shape, choice, mean) for (shape, choice), (mean, *_) in self._means.items()]

    def _fitted(self) -> np.ndarray:
        """Return the weights with the least relative error, and small ones where the shapes do not determine them."""
        means = np.array([mean for mean, *_ in self._means.values()])
        rows = np.stack([_features(*key) for key in self._means]) / means[:, None]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
        rows = rows / scale
        found = np.linalg.solve(rows.T @ rows + RIDGE * np.eye(rows.shape[1]), rows.sum(axis=0))
        return found / scale


def _features(shape: Shape, choice: StepChoice) -> np.ndarray:
    batch, cache_len = shape
    return np.array([1, batch, batch * choice.nodes, batch * cache_len, choice.drafts, choice.drafts * batch], float)


def _sizes(shape: Shape, choice: StepChoice) -> tuple[int, ...]:
    return *shape, choice.nodes, choice.drafts


def _at_most(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
