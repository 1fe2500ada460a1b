"""Another drafter's tree with one more branch: what prompt lookup would propose.

Heads and models guess what is new, lookup what has been written before; in edits and summaries both happen. The tree of
the other drafter stays as it is, and along it goes lookup's chain: as far as nodes of the tree hold its tokens it
shares them, and where they end it goes on in nodes of its own, so that no token is fed twice. A step finds at least as
much as the other drafter alone would have found there, and as lookup alone with a chain of as many nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.drafters import ngram
from hydrajax.drafters.drafter import Drafter, DrafterSpec, Proposal
from hydrajax.drafters.lookup import NOTHING, PromptLookup
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.trees.topology import Topology, take, with_chain

NODES, MOST_NODES = 5, 999


class BothStates(NamedTuple):
    """The wrapped drafter's state, and the text so far."""

    drafter: Any
    history: ngram.History


@dataclass(frozen=True)
class WithLookup:
    """``drafter`` with the chain of ``lookup`` as one more branch of its tree.

    branch_nodes: L, the nodes of its own that the chain gets behind the tree's. They hold the first L of its tokens
    that follow the last node shared with the tree, so that it reaches L tokens ahead or more; where nothing is found
    they hold -1. Parameters are those of the drafter.

    Methods: `hydrajax.drafters.drafter.Drafter`. Every rule can judge it that can judge the drafter. Where the drafter
    draws, the branch's own nodes are given, last among their siblings (see `RejectionSampling`). Whether one is there
    depends on the text and on what the drafter drew for its place and those before it, which has been looked at by
    then, so the output stays the base's.

    What is accepted the drafter reads as it reads a prompt, because lookup's nodes are none that it has run. For heads
    that is the same; a draft model runs the accepted tokens once more. Raises `HydrajaxError` for a number of nodes
    that makes no sense.
    """

    drafter: Drafter
    branch_nodes: int = NODES
    lookup: PromptLookup = field(default_factory=PromptLookup)

    def __post_init__(self):
        if not 1 <= self.branch_nodes <= MOST_NODES:
            raise HydrajaxError(f"draft: lookup-L+... adds L nodes, from 1 to {MOST_NODES}, found {self.branch_nodes}")

    @cached_property
    def spec(self) -> DrafterSpec:
        """The drafter's, with the branch. It runs accepted tokens as a prompt, needs the base and is not trained."""
        inner = self.drafter.spec
        return replace(
            inner, branch_nodes=self.branch_nodes, independent=False, has_distribution=False, num_draft_heads=0
        )

    def init(self, rng, base):
        return self.drafter.init(rng, base)

    def init_state(self, batch, slots):
        return BothStates(self.drafter.init_state(batch, slots), self.lookup.init_state(batch, slots))

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return BothStates(
            self.drafter.begin(params, state.drafter, aux_hidden_states, tokens, counts, bonus_token, base),
            self.lookup.begin({}, state.history, aux_hidden_states, tokens, counts, bonus_token, base),
        )

    def rewind(self, state, lengths):
        return BothStates(self.drafter.rewind(state.drafter, lengths), self.lookup.rewind(state.history, lengths))

    def propose(self, params, state, root, tree, base, draw=None):
        proposal = self.drafter.propose(params, state.drafter, root, tree, base, draw)
        found = self.lookup.look_up(state.history, root, tree.depth + self.branch_nodes)
        chain = jnp.where(found.found[:, 0, :1], found.tokens[:, 0, 0], NOTHING)
        last = last_shared(proposal.tokens, proposal.tree, chain)
        rest = proposal.tree.at(proposal.tree.depths, last)[:, None] + jnp.arange(self.branch_nodes)
        added = jnp.take_along_axis(chain, rest, axis=1)
        tokens = jnp.concatenate([proposal.tokens, added], axis=1)
        return Proposal(tokens, with_chain(proposal.tree, last, self.branch_nodes), proposal.log_q)

    def observe(self, params, state, proposal, outcome, base):
        aux_hidden_states, counts = outcome.along_path(), outcome.counts
        return self.begin(params, state, aux_hidden_states, outcome.tokens, counts, outcome.bonus_token, base)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """Those of the drafter: the branch needs no place in its tree."""
        return self.drafter.ranks(params, aux_hidden_states, batch, base, chunk_tokens, depth)


def last_shared(tokens: Int[Array, "B N"], tree: Topology, chain: Int[Array, "B n"]) -> Int[Array, " B"]:
    """The deepest node of each row's tree to which a path leads that holds the beginning of the chain."""
    # [B, N]: what the chain has at each node's depth; the root is no part of it, and shared.
    depths = jnp.broadcast_to(tree.depths, tokens.shape)
    same = (tokens == take(chain, jnp.maximum(depths - 1, 0))) & (tokens >= 0) | (depths == 0)
    shared = jnp.all(same[:, None, :] | ~tree.mask, axis=2)
    return jnp.argmax(jnp.where(shared, depths, -1), axis=1).astype(jnp.int32)
