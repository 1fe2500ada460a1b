"""The full training forward on small inputs: logits for every head and position."""

from __future__ import annotations

import jax.numpy as jnp


def forced_logits(drafter, params, aux_hidden_states, tokens, base):
    """Return float32 logits ``[K, B, T, V]``: head k at position t predicts token t + 2 + k. Tokens outside its
    vocabulary have -inf.
    """
    hidden = drafter.teacher_hidden(params, aux_hidden_states, tokens, base)
    logits = jnp.stack([drafter.head_logits(params, k, rows, base) for k, rows in enumerate(hidden)])
    if drafter.vocabulary is None:
        return logits
    unknown = jnp.full((*logits.shape[:-1], base.config.vocab_size), -jnp.inf)
    return unknown.at[..., drafter.vocabulary.tokens].set(logits)
