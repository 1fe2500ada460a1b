"""Both halves of the training forward at once: a vocabulary's logits for every head and position, on small inputs."""

from __future__ import annotations

import jax.numpy as jnp


def forced_logits(drafter, params, aux_hidden_states, tokens, base):
    """Float32 ``[K, B, T, V]``: the logits of head k at position t, which predict token t + 2 + k; -inf for tokens that
    the head does not know.
    """
    hidden = drafter.teacher_hidden(params, aux_hidden_states, tokens, base)
    logits = jnp.stack([drafter.head_logits(params, k, rows, base) for k, rows in enumerate(hidden)])
    if drafter.vocabulary is None:
        return logits
    unknown = jnp.full((*logits.shape[:-1], base.config.vocab_size), -jnp.inf)
    return unknown.at[..., drafter.vocabulary.tokens].set(logits)
