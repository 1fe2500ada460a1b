"""Scalings of the rotary frequencies for longer contexts."""

import math
from dataclasses import dataclass

import numpy as np

from hydrajax.errors import HydrajaxError, one_of

ROPE_KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies for longer contexts.

    Attributes:
        kind: ``"linear"``: every frequency is divided by ``factor``. ``"llama3"``: only low frequencies, with a smooth
            transition between ``low_freq_factor`` and ``high_freq_factor`` (LLaMA 3.1). ``"yarn"``: those that turn
            less than ``beta_slow`` times in the original context; those that turn more than ``beta_fast`` times stay
            (YaRN, 2309.00071). ``"longrope"``: each frequency has a divisor of its own (LongRoPE, 2402.13753).
            ``"proportional"``: as linear, and only the first ``part`` of the frequencies turn (LFM3).
        factor: The divisor; for longrope the context of ``long_factors`` over the original one.
        original_max_position: Length of the texts before the extension.
        attention_factor: Multiplies cosines and sines (yarn, longrope).
        truncate: Round the ends of yarn's transition to whole features.
        short_factors: The divisors of longrope, one per frequency, for texts of up to ``original_max_position`` tokens.
        long_factors: Those for longer texts. They are kept for exports and not used.
        part: Share of the frequencies that turn (proportional).
        query_beta: Queries at position p are multiplied by ``1 + query_beta * log(1 + p // original_max_position)``
            (Ministral 3).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    part: float = 1.0
    query_beta: float = 0.0

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise HydrajaxError(f"rope scaling: got type '{self.kind}', expected {one_of(ROPE_KINDS)}")
        for name in ("factor", "attention_factor", "original_max_position", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise HydrajaxError(f"rope scaling: {name}: got {getattr(self, name)}, expected a positive number")
        if not 0 < self.part <= 1:
            raise HydrajaxError(f"rope scaling: part: got {self.part}, expected more than 0 and at most 1")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise HydrajaxError(
                f"rope scaling: low_freq_factor: got {self.low_freq_factor}, expected less than high_freq_factor, "
                f"{self.high_freq_factor}"
            )
        if self.kind == "longrope" and not all(x > 0 for x in self.short_factors + self.long_factors):
            raise HydrajaxError("rope scaling: short_factor and long_factor: expected positive numbers")

    def scaled(self, freqs: np.ndarray, theta: float) -> np.ndarray:
        """Return the scaled frequencies, float32, of those with the base ``theta``."""
        if self.kind == "linear":
            return freqs / np.float32(self.factor)
        if self.kind == "proportional":
            turns = np.arange(len(freqs)) < int(self.part * len(freqs))
            return np.where(turns, freqs / np.float32(self.factor), np.float32(0))
        if self.kind == "longrope":
            return freqs / np.asarray(self.short_factors, np.float32)
        if self.kind == "yarn":
            smooth = self._yarn_smooth(2 * len(freqs), theta)
        else:  # LLaMA 3.1: wavelengths beyond the original context are divided by `factor`, short ones are kept.
            wavelengths = 2 * np.pi / freqs
            low, high = self.low_freq_factor, self.high_freq_factor
            smooth = np.clip((self.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * freqs / self.factor + smooth * freqs).astype(np.float32)

    def _yarn_smooth(self, n_features: int, theta: float) -> np.ndarray:
        """Return the share of each frequency that YaRN keeps, between 1 for the first ones and 0 for the last ones."""

        def place(turns: float) -> float:  # of the frequency that turns so often in the original context
            wavelength = self.original_max_position / turns
            return n_features * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        first, last = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, n_features - 1)
        width = np.float32(last - first or 0.001)
        return 1 - np.clip((np.arange(n_features // 2, dtype=np.float32) - np.float32(first)) / width, 0.0, 1.0)
