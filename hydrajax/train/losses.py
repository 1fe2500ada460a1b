"""Training losses: next token for the base; own targets or the base's distribution for the draft heads.

All are float32 means over the positions whose *target* counts. Draft head k at position t answers for token t + 2 + k
(the base's own head for t + 1), so position t of a row of T tokens has a target up to t = T - 3 - k.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

IGNORED = -100  # a label that is no target, as in transformers and the released training code


def masked_mean(values: Float[Array, "*rows"], mask: Bool[Array, "*rows"]) -> Float[Array, ""]:
    """The mean of ``values`` where ``mask`` holds; 0 where it holds nowhere."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def next_token_loss(logits: Float[Array, "B T V"], labels: Int[Array, "B T"], shift: int = 1) -> Float[Array, ""]:
    """Cross entropy of the logits at position t against the token at t + ``shift``, in nats per token.

    ``labels`` are the token ids, `IGNORED` where a token is not to be predicted.
    """
    logits, targets = logits[:, :-shift].astype(jnp.float32), labels[:, shift:]
    counts = targets != IGNORED
    chosen = jnp.take_along_axis(logits, jnp.where(counts, targets, 0)[..., None], axis=-1)[..., 0]
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) - chosen, counts)


def teacher_loss(
    logits: Float[Array, "B T V"], base_logits: Float[Array, "B T V"], labels: Int[Array, "B T"], shift: int
) -> Float[Array, ""]:
    """Cross entropy against the base's own distribution of the token at t + ``shift`` (hydra 3.1, "teacher loss").

    The base speaks of that token at position t + ``shift`` - 1. No gradient flows into ``base_logits``.
    """
    logits, counts = logits[:, :-shift].astype(jnp.float32), labels[:, shift:] != IGNORED
    target = jax.nn.softmax(jax.lax.stop_gradient(base_logits)[:, shift - 1 : -1].astype(jnp.float32), axis=-1)
    # -sum(p log q), without an array of log q: sum(p) is 1.
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(target * logits, axis=-1), counts)


def head_losses(
    head_logits: Float[Array, "K B T V"], labels: Int[Array, "B T"], base_logits: Float[Array, "B T V"] | None = None
) -> Float[Array, " K"]:
    """The loss of each draft head, float32: `teacher_loss` where ``base_logits`` are given, else `next_token_loss`.

    Hydra minimises their plain sum (DESIGN section 4), Medusa-1 a weighted one (medusa 2.2.1).
    """
    losses = []
    for k, logits in enumerate(head_logits):
        if base_logits is None:
            one_head = functools.partial(next_token_loss, shift=k + 2)
        else:
            one_head = functools.partial(teacher_loss, base_logits=base_logits, shift=k + 2)
        # Softmaxes are computed again in the backward pass: of [K, B, T, V] only the logits stay alive.
        losses.append(jax.checkpoint(one_head)(logits, labels=labels))
    return jnp.stack(losses)
