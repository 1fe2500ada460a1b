"""Losses of a draft's distribution q against the base's p, and weights of the tokens that it guesses one after another.

The probability that rejection sampling accepts a token of q is α = Σ_v min(p(v), q(v)) (Leviathan et al. 2023, theorem
3.5). Cross entropy and KL only bound it. LK losses (Samarin et al. 2026, arXiv 2602.23881) optimise it directly.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from hydrajax.models.arrays import Array

LOSSES = ("cross_entropy", "tv", "lk", "lk_hybrid")
POSITION_WEIGHTS = ("decay", "d_pace")


def overlap(log_q: Float[Array, "*rows V"], p: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Return α = Σ_v min(p(v), q(v))."""
    return jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)


def teacher_loss(
    name: str, eta: float, log_q: Float[Array, "*rows V"], p: Float[Array, "*rows V"]
) -> Float[Array, "*rows"]:
    """Return the loss ``name`` of `LOSSES` for each row, float32.

    - ``cross_entropy``: -Σ p log q, in nats;
    - ``tv``: the total variation distance 1 - α;
    - ``lk``: -log α. Its gradient is that of ``tv``, divided by α;
    - ``lk_hybrid``: λ KL(p ‖ q) + (1 - λ) (1 - α), where λ = exp(-eta α) has no gradient. It starts as KL, whose
      gradient does not vanish where p and q have no common tokens, and approaches ``tv``.
    """
    cross_entropy = -jnp.sum(p * log_q, axis=-1)
    if name == "cross_entropy":
        return cross_entropy
    alpha = overlap(log_q, p)
    if name == "tv":
        return 1 - alpha
    if name == "lk":
        return -jnp.log(jnp.maximum(alpha, jnp.finfo(alpha.dtype).tiny))
    share = jnp.exp(-eta * jax.lax.stop_gradient(alpha))
    kl = cross_entropy + jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)
    return share * kl + (1 - share) * (1 - alpha)


def d_pace_weights(
    confidence: Float[Array, "*rows K"], counts: Bool[Array, "*rows K"], alpha: float
) -> Float[Array, "*rows K"]:
    """Return the weights of K successive guesses by D-PACE (Wu et al. 2026, arXiv 2605.18810), without gradient.

    w_j = Σ_{m >= j} Π_{i <= m} c_i: the derivative of the expected number of accepted guesses in log c_j, where c_i is
    the draft's probability of the text's token, smoothed to (1 - alpha) c_i + alpha (equations 7 and 8).

    Args:
        confidence: The draft's probability of each target.
        counts: Guesses that have a target; the others have the weight 0 and leave the product unchanged.
    """
    smoothed = jnp.where(counts, (1 - alpha) * confidence + alpha, 1.0)
    reached = jnp.where(counts, jnp.cumprod(smoothed, axis=-1), 0.0)
    later = jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)
    return jax.lax.stop_gradient(jnp.where(counts, later, 0.0))
