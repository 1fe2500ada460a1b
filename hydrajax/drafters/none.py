"""The drafter that proposes nothing: with the root-only tree it makes the decode loop autoregressive.

The baseline is therefore the same engine, cache and jit as tree decoding; the empty proposal and the one-node
acceptance compile to nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from hydrajax.drafters.drafter import DrafterSpec, Proposal
from hydrajax.drafters.kind import DrafterKind


@dataclass(frozen=True)
class NoDrafter:
    """No draft. The methods are those of `hydrajax.drafters.drafter.Drafter`."""

    # It samples no tokens, which every distribution allows.
    spec: ClassVar[DrafterSpec] = DrafterSpec(depth=0, default_tree="root", supports_sampling=True)

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return ()

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return ()

    def rewind(self, state, lengths):
        return ()

    def propose(self, params, state, root, tree, base, draw=None):
        return Proposal(root[:, None], tree.topology)

    def observe(self, params, state, proposal, outcome, base):
        return ()

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        return jnp.zeros((0, *batch["tokens"].shape), jnp.int32)


KIND = DrafterKind("no draft", NoDrafter, about="no draft at all")
