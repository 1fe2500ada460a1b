"""What a chain of drafted tokens is worth, in closed form (Leviathan et al. 2023, section 3).

Names as in the paper: alpha is the expected chance that a drafted token is accepted, taken to be the same and
independent at every place; gamma, here K, how many are drafted; c the time of one pass of the draft in passes of the
base. The paper's beta at a place is the sum over all tokens of min(p, q), and alpha is its mean (3.2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hydrajax.errors import HydrajaxError


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per step of a chain of K, the base's own one counted: (1 - alpha^(K+1)) / (1 - alpha), equation 1.

    Raises `HydrajaxError` for an alpha that is no probability, or a negative K.
    """
    _check(alpha, k)
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def improvement(alpha: float, k: int, c: float) -> float:
    """How many times faster than without a draft: (1 - alpha^(K+1)) / ((1 - alpha) (c K + 1)), theorem 3.8.

    It takes a pass of the base over K + 1 tokens to cost what one over a single token does.
    """
    if c < 0:
        raise HydrajaxError(f"cost: of a pass of the draft, must be at least 0, found {c}")
    return expected_tokens(alpha, k) / (c * k + 1)


def best_length(alpha: float, c: float, most: int) -> int:
    """The K from 0 to ``most`` with the greatest `improvement`, of equals the smallest; 0 where no draft pays (3.3)."""
    return max(range(most + 1), key=lambda k: (improvement(alpha, k, c), -k))


@dataclass(frozen=True)
class ChainEstimate:
    """The best chain by the closed form.

    acceptance: α, the mean chance that a drafted token is accepted. draft_cost: c, the time of drafting one in steps
    without a draft. length: K. tokens_per_step and improvement are those of this K.
    """

    acceptance: float
    draft_cost: float
    length: int
    tokens_per_step: float
    improvement: float

    def __str__(self) -> str:
        found = f"α {self.acceptance:.2f}, c {self.draft_cost:.2f}"
        if not self.length:
            return f"{found}: no chain should pay (Leviathan et al. 3.3: only where α > c)"
        return (
            f"{found}: chain-{self.length} should be the best chain, {self.tokens_per_step:.2f} tokens per step and "
            f"{self.improvement:.2f} times as fast as none (Leviathan et al. 3.3)"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(acceptance: float, draft_cost: float, most: int) -> ChainEstimate:
    """For chains of at most ``most`` tokens."""
    k = best_length(acceptance, draft_cost, most)
    gains = expected_tokens(acceptance, k), improvement(acceptance, k, draft_cost)
    return ChainEstimate(acceptance, draft_cost, k, *gains)


def _check(alpha: float, k: int) -> None:
    if not 0 <= alpha <= 1:
        raise HydrajaxError(f"acceptance: must be from 0 to 1, found {alpha}")
    if k < 0:
        raise HydrajaxError(f"K: must be at least 0, found {k}")
