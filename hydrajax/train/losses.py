"""Training losses: next token for the base; the text or the base's own distribution for the draft heads.

All are float32 means, in nats, over the positions whose *target* counts. Draft head k at position t answers for token
t + 2 + k (the base's own head for t + 1), so in a row of T tokens it has targets up to t = T - 3 - k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

IGNORED = -100  # a label that is no target, as in transformers and the released training code


def targets(labels: Int[Array, "B T"], shift: int | Array) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The token ``shift`` places on from each position, and whether there is one that counts."""
    ahead = jnp.roll(labels, -shift, axis=1)
    inside = jnp.arange(labels.shape[1]) < labels.shape[1] - shift  # the rest has wrapped around
    return ahead, inside & (ahead != IGNORED)


def masked_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The mean of ``values`` where ``mask`` holds; 0 where it holds nowhere."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def next_token_loss(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], shift: int | Array = 1
) -> Float[Array, ""]:
    """Cross entropy of the logits at position t against the token at t + ``shift``.

    ``labels`` are the token ids, `IGNORED` where a token is not to be predicted.
    """
    tokens, counts = targets(labels, shift)
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.where(counts, tokens, 0)[..., None], axis=-1)[..., 0]
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) - chosen, counts)


def teacher_loss(
    logits: Float[Array, "B T V"], base_probs: Float[Array, "B T V"], labels: Int[Array, "B T"], shift: int | Array
) -> Float[Array, ""]:
    """Cross entropy against the base's own distribution of the token at t + ``shift`` (hydra 3.1, "teacher loss").

    The base speaks of that token at position t + ``shift`` - 1. ``labels`` say which targets count.
    """
    _, counts = targets(labels, shift)
    logits = logits.astype(jnp.float32)
    expected = jnp.sum(jnp.roll(base_probs, 1 - shift, axis=1) * logits, axis=-1)
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) - expected, counts)


def head_losses(
    head_logits: Float[Array, "K B T V"], labels: Int[Array, "B T"], base_logits: Float[Array, "B T V"] | None = None
) -> Float[Array, " K"]:
    """The loss of each draft head: `teacher_loss` where ``base_logits`` are given, else `next_token_loss`.

    No gradient flows into ``base_logits``. Hydra minimises the plain sum over heads (DESIGN section 4), Medusa-1 a
    weighted one (medusa 2.2.1).
    """
    shifts = 2 + jnp.arange(head_logits.shape[0])
    if base_logits is None:
        one_head = jax.checkpoint(lambda head: next_token_loss(head[0], labels, head[1]))
    else:
        base_probs = jax.nn.softmax(jax.lax.stop_gradient(base_logits).astype(jnp.float32), axis=-1)
        one_head = jax.checkpoint(lambda head: teacher_loss(head[0], base_probs, labels, head[1]))
    # A loop with rematerialisation: nothing of the size of the logits is kept for the backward pass but they
    # themselves. It is also twice as fast as iterating over them, whose gradient XLA CPU (jax 0.10) stacks badly.
    return jax.lax.map(one_head, (head_logits, shifts))
