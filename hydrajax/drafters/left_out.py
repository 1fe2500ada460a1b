"""A drafter that is left out for a while: it reads no text, and its state stays as it is.

A server takes plain steps while they are faster. A draft that observes their tokens costs a part of each step,
so it misses them, and prompts too. Later it reads them again as a prompt
(`hydrajax.serve.executor_pool.ExecutorPool.catch_up`). A gap in its text may cost acceptance and never changes the
output.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from hydrajax.drafters.drafter import Drafter, DrafterSpec, Proposal


@dataclass(frozen=True)
class Unread:
    """``drafter`` in the prefill of prompts that it does not read. States and parameters are those of ``drafter``."""

    drafter: Drafter

    @property
    def spec(self) -> DrafterSpec:
        return self.drafter.spec

    def init(self, rng, base):
        return self.drafter.init(rng, base)

    def init_state(self, batch, slots):
        return self.drafter.init_state(batch, slots)

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return state

    def rewind(self, state, lengths):
        return self.drafter.rewind(state, lengths)

    def propose(self, params, state, root, tree, base, draw=None):
        return self.drafter.propose(params, state, root, tree, base, draw)

    def observe(self, params, state, proposal, outcome, base):
        return state

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        return self.drafter.ranks(params, aux_hidden_states, batch, base, chunk_tokens, depth)


@dataclass(frozen=True)
class LeftOut(Unread):
    """``drafter`` in plain steps, whose tree is the root."""

    @cached_property
    def spec(self) -> DrafterSpec:
        return replace(self.drafter.spec, branch_nodes=0, window_nodes=0, reach=0)

    def propose(self, params, state, root, tree, base, draw=None):
        return Proposal(root[:, None], tree.topology)
