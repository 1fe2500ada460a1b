"""The drafter that proposes nothing: with the root-only tree it makes the decode loop autoregressive.

The baseline is therefore the same engine, the same cache and the same jit as tree decoding; the empty proposal and
the one-node acceptance compile to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class NoDrafter:
    """See `hydrajax.drafters.drafter.Drafter` for the methods."""

    depth: int = 0
    hidden_state_offset: int = 0

    def init_boxed(self, rng, base):
        return {}

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return ()

    def observe(self, params, state, features, tokens, counts, base):
        return ()

    def propose(self, params, state, root, tree, base):
        return root[:, None]

    def teacher_hidden(self, params, features, tokens, base, rng=None, positions=None, mask=None):
        return ()

    def teacher_forced(self, params, features, tokens, base):
        return jnp.zeros((0, *tokens.shape, base.config.vocab_size))
