"""The stepped executor: every step returns to the host, which works while the base verifies.

A grammar needs this. Which tokens it allows after a node depends on the text of the path to that node, which a parser
on the host tracks. The parser runs between propose and accept, during the base's pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.state import DecodeState
from hydrajax.drafters.drafter import Proposal
from hydrajax.models import backend


class Candidates(NamedTuple):
    """A proposal on the host.

    Attributes:
        tokens: int32 ``[B, N]`` in node order, node 0 the root; -1 for nodes without a guess.
        parents: int32 ``[B, N]`` each node's parent, which precedes it; -1 for the root and for nodes that are never
            accepted.
        emitted: int32 ``[B, room]`` the output so far, without the root; garbage beyond ``lengths``.
        lengths: int32 ``[B]`` emitted tokens.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    emitted: Int[np.ndarray, "B room"]
    lengths: Int[np.ndarray, " B"]


# Returns the processors of one step, such as `hydrajax.decoding.processors.AllowedTokens`. Called with None for the
# token after a prompt, where node 0 is the only node.
Between = Callable[[Candidates | None], Sequence[Any]]


def no_processors(candidates: Candidates | None) -> Sequence[Any]:
    return ()


class SteppedExecutor(Executor):
    """Propose and verify, host work, accept: two programs per step, each compiled once per shape.

    Attributes:
        between: Called in every step after the base's pass was dispatched. It returns processors that are part of the
            base's distribution, after those of the spec.
    """

    def __init__(self, *args: Any, between: Between = no_processors, **settings: Any):
        """The arguments are those of `Executor`."""
        self._between = between
        super().__init__(*args, **settings)

    def _jit_verbs(self):
        super()._jit_verbs()
        engine = self.engine

        # A static tree stays a constant of each program and is not passed between them.
        def propose(params, state, stopped):
            proposal = engine.propose(params, state)
            done = state.output.done | stopped
            return done, proposal if proposal.tree.of_each_row else proposal._replace(tree=None)

        def with_tree(proposal):
            return proposal if proposal.tree is not None else proposal._replace(tree=engine.tree.topology)

        def verify(params, cache, proposal):
            return engine.verify(params, cache, with_tree(proposal))

        def settle(params, state, forward, logits, proposal, extra):
            return engine.settle(params, state, forward, logits, with_tree(proposal), extra)

        options = backend.compiler_options()
        self._propose = jax.jit(propose, compiler_options=options)
        self._verify = jax.jit(verify, compiler_options=options)
        self._settle = jax.jit(settle, donate_argnums=1, compiler_options=options)

    def prefill(self, prompt, lengths, sampling, slots=None):
        given = self._placed((prompt, lengths, sampling))
        return self._prefill(self.params, *given, slots=slots, extra=tuple(self._between(None)))

    def extend(self, state, text, lengths, sampling):
        given = self._placed((text, lengths, sampling))
        return self._extend(self.params, state, *given, extra=tuple(self._between(None)))

    def advance(self, state: DecodeState, stopped, n_steps):
        for _ in range(n_steps):
            ended = state.output.done
            done, proposal = self._propose(self.params, state, np.array(stopped))
            state = state._replace(output=state.output._replace(done=done))
            if (np.asarray(ended) | stopped).all():  # known since the last step; the device is busy proposing
                break
            forward, logits = self._verify(self.params, state.target.cache, proposal)
            extra = tuple(self._between(self._candidates(state, proposal)))
            state = self._settle(self.params, state, forward, logits, proposal, extra)
        return state, Snapshot.of(state.output)

    def _candidates(self, state: DecodeState, proposal: Proposal) -> Candidates:
        """Fetch the candidates for the host; the base's pass continues meanwhile."""
        parents = self.engine.tree.topology.parents if proposal.tree is None else proposal.tree.parents
        found = proposal.tokens, parents, state.output.tokens, state.output.lengths
        tokens, parents, emitted, lengths = jax.device_get(found)
        return Candidates(tokens, np.broadcast_to(parents, tokens.shape), emitted, lengths)

    @property
    def _settings(self):
        return super()._settings | {"between": self._between}
