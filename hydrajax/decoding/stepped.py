"""The stepped executor: every step returns to the host, which works while the base verifies.

A grammar needs this. Which tokens it allows after a node depends on the text of the path to that node, which a parser
on the host tracks (`hydrajax.decoding.constraints.Constraint`). Before propose the parser names the forced tokens,
which join the tree as a branch, or replace it where it reaches no further. Between propose and accept, during the
base's pass, the parser masks every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.constraints import ALL, Constraint, words
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.processors import AllowedTokens
from hydrajax.decoding.spec import SamplingParams
from hydrajax.decoding.state import DecodeState
from hydrajax.drafters.branch import with_branch
from hydrajax.drafters.drafter import Proposal
from hydrajax.models import backend
from hydrajax.trees import presets


class SteppedState(NamedTuple):
    """The arrays, and the constraint of each sequence, None for none."""

    decode: DecodeState
    constraints: tuple[Constraint | None, ...]


class AnyText:
    """A constraint that allows every token, and forces some, to compile with."""

    error = None

    def __init__(self, forced: list[int]):
        self._forced = forced

    def copy(self) -> AnyText:
        return self

    def follow(self, text):
        pass

    def forced(self, most):
        return self._forced[:most]

    def allow(self, tokens, parents, allowed):
        allowed[:] = ALL


class SteppedExecutor(FusedExecutor):
    """Propose and verify, host work, accept: three programs per step, each compiled once per shape.

    Each sequence follows its constraint in `SamplingParams.constraints`, by default the grammar of the spec. A batch
    without constraints decodes as in the fused executor. A step in which no constraint forces a token verifies no
    nodes for forced tokens.
    """

    follows_grammars = True

    def _jit_verbs(self):
        super()._jit_verbs()
        engine = self.engine

        # A static tree stays a constant of each program and is not passed between them.
        def propose(params, state):
            proposal = engine.propose(params, state)
            return proposal if proposal.tree.of_each_row else proposal._replace(tree=None)

        def with_tree(proposal):
            return proposal if proposal.tree is not None else proposal._replace(tree=engine.tree.topology)

        def join(proposal, forced):
            return with_branch(with_tree(proposal), forced, engine.forced_nodes)

        def forced_alone(root, forced):
            return with_branch(Proposal(root[:, None], presets.root().topology), forced, engine.forced_nodes)

        def verify(params, cache, proposal):
            return engine.verify(params, cache, with_tree(proposal))

        def settle(params, state, ended, forward, logits, proposal, extra, as_text):
            state = state._replace(output=state.output._replace(done=ended))
            return engine.settle(params, state, forward, logits, with_tree(proposal), extra, as_text)

        options = backend.compiler_options()
        self._propose = self._jit(propose, compiler_options=options)
        self._join, self._forced_alone = self._jit(join), self._jit(forced_alone)
        self._verify = self._jit(verify, compiler_options=options)
        self._settle = self._jit(settle, donate_argnums=1, static_argnames="as_text", compiler_options=options)

    decode = Executor.decode

    def _compile(self, given):
        constraints, sampling = self._constraints(given.sampling, len(given.prompt))
        for stand_in in self.stand_ins() if any(constraints) else (None,):
            others = tuple(None if one is None else stand_in for one in constraints)
            Executor._compile(self, given._replace(sampling=sampling._replace(constraints=others)))

    def stand_ins(self) -> tuple[AnyText, ...]:
        """Return constraints whose steps have every shape that steps can have: those without forced tokens, with one,
        and with more than the draft's tree is deep.
        """
        if not self.spec.forced_nodes:
            return (AnyText([]),)
        return AnyText([]), AnyText([0]), AnyText([0] * self.spec.longest_path)

    def prefill(self, prompt, lengths, sampling, slots=None):
        constraints, sampling = self._constraints(sampling, len(lengths))
        given = self._placed((prompt, lengths, sampling))
        decode = self._prefill(self.params, *given, slots=slots, extra=self._first_masks(constraints))
        return SteppedState(decode, constraints)

    def extend(self, state, text, lengths, sampling):
        constraints, sampling = self._constraints(sampling, len(lengths))
        given = self._placed((text, lengths, sampling))
        extra = self._first_masks(constraints)
        return SteppedState(self._extend(self.params, state.decode, *given, extra=extra), constraints)

    def rewind(self, state, lengths, counts=None):
        return state._replace(decode=super().rewind(state.decode, lengths, counts))

    def target(self, state):
        return state.decode

    def advance(self, state, stopped, n_steps):
        decode, constraints = state
        if not any(constraints):
            decode, now = super().advance(decode, stopped, n_steps)
            return SteppedState(decode, constraints), now
        ended = self._follow(decode, constraints, stopped)
        for _ in range(n_steps):
            if ended.all():
                break
            forced = self._forced(constraints, ended)
            proposal = self._candidates(decode, forced, ended)
            forward, logits = self._verify(self.params, decode.target.cache, proposal)
            extra = self._masks(constraints, *self._on_host(proposal), ended)
            given = self.params, decode, ended, forward, logits, proposal, extra
            decode = self._settle(*given, as_text=forced is not None)
            ended = self._follow(decode, constraints, stopped)
        decode = decode._replace(output=decode.output._replace(done=self._placed(jnp.asarray(ended))))
        return SteppedState(decode, constraints), Snapshot.of(decode.output)

    def _candidates(self, decode: DecodeState, forced: Int[np.ndarray, "B n"] | None, ended: np.ndarray) -> Proposal:
        """Return the drafter's tree, with a branch of forced tokens if there are any.

        A tree reaches no further than forced tokens that are as many as it is deep, and is then left out.
        """
        if forced is None:
            return self._propose(self.params, decode)
        depth = self.spec.longest_path - self.spec.forced_nodes
        if depth == 0 or (forced[~ended, depth - 1] >= 0).all():
            return self._forced_alone(decode.target.root, self._placed(forced))
        return self._join(self._propose(self.params, decode), self._placed(forced))

    # --- the host's part ----------------------------------------------------------------------------------------------

    def _constraints(
        self, sampling: SamplingParams, batch: int
    ) -> tuple[tuple[Constraint | None, ...], SamplingParams]:
        """Return a new constraint of each sequence, and the sampling parameters without constraints."""
        given = sampling.constraints
        if given is None:
            given = self.constraints([self.spec] * batch)
        return tuple(None if one is None else one.copy() for one in given), sampling._replace(constraints=None)

    def _follow(self, decode: DecodeState, constraints: Sequence[Constraint | None], stopped) -> np.ndarray:
        """Move the constraints to the next root. Return which sequences take no further step."""
        out = decode.output
        done, tokens, lengths, roots = jax.device_get((out.done, out.tokens, out.lengths, decode.target.root))
        ended = done | stopped
        for row, constraint in enumerate(constraints):
            if constraint is not None and not ended[row]:
                constraint.follow([*tokens[row, : lengths[row]].tolist(), int(roots[row])])
                ended[row] = constraint.error is not None
        return ended

    def _forced(self, constraints: Sequence[Constraint | None], ended: np.ndarray) -> Int[np.ndarray, "B n"] | None:
        """Return the tokens that must follow each root, then -1; None if there are none."""
        if not self.spec.forced_nodes:
            return None
        forced = np.full((len(ended), self.spec.longest_path), -1, np.int32)
        for row, constraint in enumerate(constraints):
            if constraint is not None and not ended[row]:
                found = constraint.forced(forced.shape[1])
                forced[row, : len(found)] = found
        return forced if (forced >= 0).any() else None

    def _on_host(self, proposal: Proposal) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"]]:
        """Fetch tokens and parents of the nodes; the base's pass continues meanwhile."""
        parents = self.engine.tree.topology.parents if proposal.tree is None else proposal.tree.parents
        tokens, parents = jax.device_get((proposal.tokens, parents))
        return tokens, np.broadcast_to(parents, tokens.shape)

    def _first_masks(self, constraints: Sequence[Constraint | None]) -> tuple[AllowedTokens, ...]:
        """Return the masks of the token after a prompt."""
        nothing = np.full((len(constraints), 1), -1, np.int32)
        return self._masks(constraints, nothing, nothing, np.zeros(len(constraints), bool))

    def _masks(self, constraints: Sequence[Constraint | None], tokens, parents, ended) -> tuple[AllowedTokens, ...]:
        """Return the masks of all nodes, none without constraints."""
        if not any(constraints):
            return ()
        allowed = np.full((*tokens.shape, words(self.model.config.vocab_size)), ALL, np.uint32)
        for row, constraint in enumerate(constraints):
            if constraint is not None and not ended[row]:
                constraint.allow(tokens[row], parents[row], allowed[row])
        return (AllowedTokens(self._placed(allowed)),)
