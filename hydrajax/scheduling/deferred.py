"""A drafter that can miss steps and catch up later, so that steps without a draft cost what they would without it.

While a server drafts nothing, the draft need not read each token when it is emitted: a decoder layer or a small model
costs most per token when it reads one at a time. The base's hidden states of the last tokens are kept in a ring, and
the draft reads them in one pass before the next tree. Older tokens are left out. The draft only guesses, so a gap in
its text may cost acceptance and never changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.drafter import Drafter, Proposal
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.models.cache import write_tokens
from hydrajax.trees import presets

KEPT = 64  # tokens: a pass over them costs a few steps


class DeferredState(NamedTuple):
    """The drafter's state, and the tokens that it has not read.

    Attributes:
        drafter: The drafter's state, of ``read`` tokens.
        hidden: ``[B, P, nD]`` the base's hidden states that the drafter reads, of the last missed tokens: a ring.
        tokens: int32 ``[B, P]`` these tokens.
        missed: int32 ``[B]`` tokens since the drafter has read one; more than P if the oldest are lost.
        read: int32 ``[B]`` tokens that the drafter has read.
        length: int32 ``[B]`` tokens of the text.
    """

    drafter: Any
    hidden: Float[Array, "B P nD"]
    tokens: Int[Array, "B P"]
    missed: Int[Array, " B"]
    read: Int[Array, " B"]
    length: Int[Array, " B"]


@dataclass(frozen=True)
class Deferred:
    """``drafter`` with a ring of missed tokens. The methods are those of `hydrajax.drafters.drafter.Drafter`.

    Attributes:
        drafter: The drafter, whose parameters these are.
        model: The base.
        reads: The drafter reads the text; otherwise it misses all of it, prompts included.
        drafts: It proposes; otherwise only the root is fed, and it has to miss that. All three share one state.
        kept: P, the length of the ring.
    """

    drafter: Drafter
    model: BaseModel
    reads: bool = True
    drafts: bool = True
    kept: int = KEPT

    @cached_property
    def spec(self):
        spec = self.drafter.spec
        return replace(spec, branch_nodes=0, window_nodes=0, reach=0) if not self.drafts else spec

    def without_reading(self) -> Deferred:
        """Return the drafter that reads no prompt."""
        return replace(self, reads=False)

    def missing(self) -> Deferred:
        """Return the drafter that misses every step."""
        return replace(self, reads=False, drafts=False)

    def init(self, rng, base):
        return self.drafter.init(rng, base)

    def init_state(self, batch, slots):
        width = self.model.config.width * max(len(self.drafter.spec.aux_hidden_layers), 1)
        nothing = jnp.zeros(batch, jnp.int32)
        return DeferredState(
            self.drafter.init_state(batch, slots + self.kept),  # `catch_up` writes a whole ring after the text
            jnp.zeros((batch, self.kept, width), self.model.dtype),
            jnp.zeros((batch, self.kept), jnp.int32),
            *[nothing] * 3,
        )

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        if not self.reads:
            return self._miss(state, aux_hidden_states, tokens, counts)
        drafter = self.drafter.begin(params, state.drafter, aux_hidden_states, tokens, counts, bonus_token, base)
        return self._has_read(state, drafter, counts)

    def rewind(self, state, lengths):
        # The n-th token that the drafter has read is at most `lost` places further in the text: none that is cut stays.
        cut, lost = lengths < state.length, state.length - state.read - state.missed
        read = jnp.where(cut, jnp.clip(lengths - lost, 0, state.read), state.read)
        drafter = self.drafter.rewind(state.drafter, read)
        return state._replace(drafter=drafter, missed=jnp.where(cut, 0, state.missed), read=read, length=lengths)

    def propose(self, params, state, root, tree, base, draw=None):
        if not self.drafts:
            return Proposal(root[:, None], presets.root().topology)
        return self.drafter.propose(params, state.drafter, root, tree, base, draw)

    def observe(self, params, state, proposal, outcome, base):
        if self.reads:
            drafter = self.drafter.observe(params, state.drafter, proposal, outcome, base)
            return self._has_read(state, drafter, outcome.counts)
        return self._miss(state, outcome.along_path(), outcome.tokens, outcome.counts)

    def catch_up(self, params, state, bonus_token, base):
        """Let the drafter read the missed tokens that are still in the ring; ``bonus_token`` ``[B]`` follows them."""
        count = jnp.minimum(state.missed, self.kept)
        order = ((state.missed - count)[:, None] + jnp.arange(self.kept)) % self.kept
        hidden = jnp.take_along_axis(state.hidden, order[:, :, None], axis=1)
        tokens = jnp.take_along_axis(state.tokens, order, axis=1)
        drafter = self.drafter.begin(params, state.drafter, hidden, tokens, count, bonus_token, base)

        def of_rows(new: Array, old: Array) -> Array:  # a sequence that has missed nothing keeps its state
            return jnp.where((count > 0).reshape(-1, *[1] * (new.ndim - 1)), new, old)

        drafter = jax.tree.map(of_rows, drafter, state.drafter)
        return state._replace(drafter=drafter, missed=jnp.zeros_like(count), read=state.read + count)

    def _miss(self, state: DeferredState, hidden, tokens, counts) -> DeferredState:
        """Return the state with the last of the first ``counts[b]`` tokens in the ring."""
        if tokens.shape[1] == 1:  # a step: one slot is written, whose place is not in use if the count is 0
            at = state.missed % self.kept
            hidden = write_tokens(state.hidden, hidden.astype(state.hidden.dtype), at)
            tokens = write_tokens(state.tokens, tokens, at)
        else:
            last = counts[:, None] - 1
            source = last - (state.missed[:, None] + last - jnp.arange(self.kept)) % self.kept  # of each slot
            at = jnp.maximum(source, 0)
            hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1).astype(state.hidden.dtype)
            hidden = jnp.where(source[:, :, None] >= 0, hidden, state.hidden)
            tokens = jnp.where(source >= 0, jnp.take_along_axis(tokens, at, axis=1), state.tokens)
        missed, length = state.missed + counts, state.length + counts
        return state._replace(hidden=hidden, tokens=tokens, missed=missed, length=length)

    def _has_read(self, state: DeferredState, drafter: Any, counts: Int[Array, " B"]) -> DeferredState:
        """Return the state after text that the drafter has read; tokens missed before it are lost."""
        return state._replace(
            drafter=drafter,
            missed=jnp.zeros_like(state.missed),
            read=state.read + counts,
            length=state.length + counts,
        )

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        return self.drafter.ranks(params, aux_hidden_states, batch, base, chunk_tokens, depth)
