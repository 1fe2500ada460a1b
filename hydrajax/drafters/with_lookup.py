"""Another draft's tree with one more branch: the proposal of prompt lookup.

Heads and models predict new text, lookup repeats earlier text; edits and summaries contain both. The other draft's tree
stays as it is, and lookup's chain is a branch of it (`hydrajax.drafters.branch`). A step accepts at least as much as
the other draft alone, and as lookup alone with a chain of as many nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp

from hydrajax.drafters import ngram
from hydrajax.drafters.branch import with_branch
from hydrajax.drafters.chains import NO_TOKEN
from hydrajax.drafters.drafter import Drafter, DrafterSpec
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.errors import HydrajaxError

NODES, MOST_NODES = 5, 999


class BothStates(NamedTuple):
    """The wrapped drafter's state, and the text so far."""

    drafter: Any
    history: ngram.History


@dataclass(frozen=True)
class WithLookup:
    """``drafter`` with the chain of ``lookup`` as one more branch of its tree.

    Every rule that can judge the drafter can judge the combination. If the drafter draws, the branch's own nodes are
    given, last among their siblings (`RejectionSampling`). Whether such a node exists depends on the text and on
    earlier draws, all of which have been judged by then, so the output keeps the base's distribution.

    The drafter reads accepted tokens as it reads a prompt because it has not run lookup's nodes. For heads this makes
    no difference; a draft model runs the accepted tokens once more.

    Attributes:
        drafter: Its parameters are those of the combination.
        branch_nodes: L, the number of nodes that the chain has of its own. They hold the L tokens after the last node
            shared with the tree, so the chain reaches at least L tokens ahead; -1 without a match.
        lookup: The n-gram search.

    Raises:
        HydrajaxError: For a number of nodes out of range.
    """

    drafter: Drafter
    branch_nodes: int = NODES
    lookup: PromptLookup = field(default_factory=PromptLookup)

    def __post_init__(self):
        if not 1 <= self.branch_nodes <= MOST_NODES:
            raise HydrajaxError(
                f"draft: got lookup-{self.branch_nodes}+..., expected lookup-L+... with L up to {MOST_NODES}"
            )

    @cached_property
    def spec(self) -> DrafterSpec:
        """The drafter's spec with the branch: accepted tokens are prefilled, it needs the base, and it is not
        trained.
        """
        inner = self.drafter.spec
        return replace(
            inner, branch_nodes=self.branch_nodes, independent=False, has_distribution=False, num_draft_heads=0
        )

    def title(self, of: Callable[[Drafter], str]) -> str:
        """Return the display name; ``of`` returns the drafter's."""
        return f"{of(self.drafter)} with lookup"

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
        chain = jnp.where(found.found[:, 0, :1], found.tokens[:, 0, 0], NO_TOKEN)
        return with_branch(proposal, chain, self.branch_nodes)

    def observe(self, params, state, proposal, outcome, base):
        return self.begin(params, state, *outcome.as_text(), base)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """Return the drafter's ranks: the branch needs no node of its tree."""
        return self.drafter.ranks(params, aux_hidden_states, batch, base, chunk_tokens, depth)
