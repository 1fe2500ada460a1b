"""The value of a chain of drafted tokens in closed form (Leviathan et al. 2023, section 3).

Names as in the paper: alpha is the expected probability that a drafted token is accepted, assumed equal and independent
at every position; gamma, here K, the number of drafted tokens; c the time of one pass of the draft in passes of the
base. The paper's beta at a position is the sum over all tokens of min(p, q), and alpha is its mean (3.2).
"""

from dataclasses import dataclass


def expected_tokens(alpha: float, k: int) -> float:
    """Return tokens per step of a chain of K, root included: (1 - alpha^(K+1)) / (1 - alpha), equation 1."""
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def improvement(alpha: float, k: int, c: float) -> float:
    """Return the speed-up over decoding without a draft: (1 - alpha^(K+1)) / ((1 - alpha) (c K + 1)), theorem 3.8.

    This assumes that a pass of the base over K + 1 tokens costs as much as one over a single token.
    """
    return expected_tokens(alpha, k) / (c * k + 1)


def best_length(alpha: float, c: float, most: int) -> int:
    """Return the K from 0 to ``most`` with the greatest `improvement`, ties to the smallest; 0 if no draft pays
    (3.3).
    """
    return max(range(most + 1), key=lambda k: (improvement(alpha, k, c), -k))


@dataclass(frozen=True)
class ChainEstimate:
    """The best chain by the closed form.

    Attributes:
        acceptance: α, the mean probability that a drafted token is accepted.
        draft_cost: c, the time of drafting one token in steps without a draft.
        length: K.
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


def estimate(acceptance: float, draft_cost: float, most: int) -> ChainEstimate:
    """Return the best chain of at most ``most`` tokens."""
    k = best_length(acceptance, draft_cost, most)
    gains = expected_tokens(acceptance, k), improvement(acceptance, k, draft_cost)
    return ChainEstimate(acceptance, draft_cost, k, *gains)
