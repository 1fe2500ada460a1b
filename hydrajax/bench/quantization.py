"""The effect of quantising a base on its logits."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import run_base


@dataclass(frozen=True)
class LogitEffect:
    """Differences between the next-token logits of two models.

    Attributes:
        largest, mean: Absolute difference of logits.
        kl: Mean KL(before || after) in nats.
        agreement: Share of positions with the same most likely token.
        perplexity_before, perplexity_after: Of the texts under the two models, from the second token on; NaN if no text
            has one.
    """

    positions: int
    largest: float
    mean: float
    kl: float
    agreement: float
    perplexity_before: float
    perplexity_after: float


def logit_effect(
    before: tuple[BaseModel, Any], after: tuple[BaseModel, Any], prompts: Iterable[np.ndarray]
) -> LogitEffect:
    """Compare two versions of a base, each ``(model, params)``, on token ids ``[T]`` of several sequences."""
    count, followed, largest, total, kl, agree = 0, 0, 0.0, 0.0, 0.0, 0
    surprise = np.zeros(2)
    for ids in prompts:
        found = jax.device_get(_differences(before[0], after[0], before[1], after[1], np.asarray(ids)[None]))
        count, followed = count + len(ids), followed + len(ids) - 1
        largest = max(largest, float(found["largest"]))
        total, kl, agree = total + found["mean"] * len(ids), kl + found["kl"], agree + found["agree"]
        surprise += found["surprise"]
    perplexities = np.exp(surprise / followed) if followed else np.full(2, np.nan)
    means = (float(value / count) for value in (total, kl, agree))
    return LogitEffect(count, largest, *means, *perplexities.tolist())


@partial(jax.jit, static_argnums=(0, 1))
def _differences(before: BaseModel, after: BaseModel, params_before, params_after, ids):
    def logits(model, params):
        return BoundBase(model, params).logits(run_base(model, params, ids).hidden)[0]

    one, other = logits(before, params_before), logits(after, params_after)
    difference, log_p, log_q = jnp.abs(one - other), jax.nn.log_softmax(one), jax.nn.log_softmax(other)
    following = ids[0, 1:, None]
    return {
        "largest": jnp.max(difference),
        "mean": jnp.mean(difference),
        "kl": jnp.sum(jnp.exp(log_p) * (log_p - log_q)),
        "agree": jnp.sum(jnp.argmax(one, axis=-1) == jnp.argmax(other, axis=-1)),
        "surprise": jnp.stack([-jnp.sum(jnp.take_along_axis(log[:-1], following, axis=1)) for log in (log_p, log_q)]),
    }
