"""The stepped executor: every step returns to the host, where parsers follow grammars.

A grammar needs this. Which tokens it allows after a node depends on the text of the path to that node, which a parser
on the host tracks (`hydrajax.decoding.constraints.Constraint`). Before propose the parser names the forced tokens,
which join the tree as a branch, or replace it where it reaches no further. Between propose and accept it masks every
node.

The draft's guesses are masked too, so that no node holds a forbidden token (`hydrajax.drafters.draft_lm_head`).

On an accelerator a step is three programs, and the parser masks while the base verifies; only the guesses after the
root are masked. On a CPU, whose cores the base needs itself, all steps are one program that calls the parser: starting
a program costs 3 microseconds per array there, because the weights have displaced everything else from the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax import ops
from hydrajax.decoding.constraints import Constraint, words
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.host_work import AnyText, Constraints, HostWork, Plan
from hydrajax.decoding.processors import AllowedTokens
from hydrajax.decoding.request import SamplingParams
from hydrajax.decoding.state import DecodeState
from hydrajax.drafters.branch import with_branch
from hydrajax.drafters.drafter import Proposal
from hydrajax.trees import presets


class SteppedState(NamedTuple):
    """The arrays, and the constraint of each sequence, None for none."""

    decode: DecodeState
    constraints: tuple[Constraint | None, ...]


@dataclass(frozen=True)
class _Verbs:
    """An engine's verbs with forced tokens and the host's masks. A static tree is not passed between programs."""

    engine: Engine
    host: Any

    def candidates(self, params, state, forced, plan, allowed):
        nodes = self.engine.program.forced_nodes
        if plan is Plan.FORCED:
            return with_branch(Proposal(state.target.root[:, None], presets.root().topology), forced, nodes)
        proposal = self.engine.propose(params, state, allowed)
        return proposal if plan is Plan.TREE else with_branch(proposal, forced, nodes)

    def propose(self, params, state, forced, first, plan):
        def after(paths):
            return first if paths.shape[2] == 1 else None

        proposal = self.candidates(params, state, forced, plan, after)
        return proposal if proposal.tree.of_each_row else proposal._replace(tree=None)

    def with_tree(self, proposal):
        return proposal if proposal.tree is not None else proposal._replace(tree=self.engine.program.tree.topology)

    def verify(self, params, cache, proposal):
        return self.engine.verify(params, cache, self.with_tree(proposal))

    def settle(self, params, state, ended, forward, logits, proposal, extra, plan):
        given = params, _with_ended(state, ended), forward, logits, self.with_tree(proposal), extra
        return self.engine.settle(*given, plan is not Plan.TREE)

    def masks(self, entry, *given):
        shape = (*given[0].shape[:2], words(self.engine.model.config.vocab_size))
        return self.host.call_host(entry, [jax.ShapeDtypeStruct(shape, jnp.uint32)], *given)[0]

    def step(self, params, entries, plan, carry):
        """Take a step that calls the host."""
        state, ended, forced, _ = carry
        state = _with_ended(state, ended)
        proposal = self.candidates(params, state, forced, plan, partial(self.masks, entries[1]))
        parents = jnp.broadcast_to(jnp.asarray(proposal.tree.parents, jnp.int32), proposal.tokens.shape)
        allowed = self.masks(entries[0], proposal.tokens, parents)
        forward, logits = self.engine.verify(params, state.target.cache, proposal)
        extra = (AllowedTokens(allowed),)
        state = self.engine.settle(params, state, forward, logits, proposal, extra, plan is not Plan.TREE)
        found = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carry[1:]]
        return state, *self.host.call_host(entries[2], found, *_to_follow(state))

    def steps(self, params, state, ended, forced, plan, entries, plans):
        """Step until the host ends it."""

        def rounds(carry):
            """Take the steps of one plan after the other: a conditional would copy the caches."""
            for number, one in enumerate(plans):
                step = partial(self.step, params, entries, one)
                carry = jax.lax.while_loop(lambda carry, it=number: carry[3] == it, step, carry)
            return carry

        state, ended, _, _ = jax.lax.while_loop(lambda carry: carry[3] >= 0, rounds, (state, ended, forced, plan))
        return _with_ended(state, ended)


class SteppedExecutor(FusedExecutor):
    """Decode under grammars; programs are compiled once per shape, of three programs per step once per `Plan`.

    Each sequence follows its constraint in `SamplingParams.constraints`, by default the grammar of its request. A
    batch without constraints decodes as in the fused executor. A step in which no constraint forces a token verifies no
    nodes for forced tokens.

    Attributes:
        host_calls: Lets one program take many steps (`hydrajax.ops.host_calls`). None: a step is three programs.
    """

    follows_grammars = True

    def _jit_verbs(self):
        super()._jit_verbs()
        self.host_calls = None if self.mesh else ops.host_calls()
        verbs, options = _Verbs(self.engine, self.host_calls), {"compiler_options": ops.compiler_options()}
        self._propose = self._jit(verbs.propose, static_argnames="plan", **options)
        self._verify = self._jit(verbs.verify, **options)
        self._settle = self._jit(verbs.settle, donate_argnums=1, static_argnames="plan", **options)
        self._steps = self._jit(verbs.steps, donate_argnums=1, static_argnames="plans", **options)

    decode = Executor.decode

    def _compile(self, given, slots):
        constraints, sampling = self._constraints(given.sampling, len(given.prompt))
        for stand_in in self.stand_ins() if any(constraints) else (None,):
            others = tuple(None if one is None else stand_in for one in constraints)
            Executor._compile(self, given._replace(sampling=sampling._replace(constraints=others)), slots)

    def stand_ins(self) -> tuple[AnyText, ...]:
        """Return constraints to compile with: any, or for steps of three programs those with every `Plan`, which are
        without forced tokens, with one, and with more than the draft's tree is deep.
        """
        if self.host_calls or not self.program.forced_nodes:
            return (AnyText([]),)
        return AnyText([]), AnyText([0]), AnyText([0] * self.program.longest_path)

    def _plans(self, batch: int) -> tuple[Plan, ...]:
        """Return the plans that steps of a batch in one program can have."""
        program = self.program
        depth = program.longest_path - program.forced_nodes
        if not program.forced_nodes:
            return (Plan.TREE,)
        # A single sequence needs a branch for more tokens than the tree holds and fewer than it is deep.
        joined = depth > 0 and (batch > 1 or program.held_tokens + 1 < depth)
        return (Plan.TREE, Plan.FORCED, Plan.JOINED) if joined else (Plan.TREE, Plan.FORCED)

    def prefill(self, prompt, lengths, sampling, slots=None):
        return self._begun(partial(self._prefill, slots=slots), sampling, *self._placed((prompt, lengths)))

    def extend(self, state, text, lengths, sampling):
        return self._begun(self._extend, sampling, state.decode, *self._placed((text, lengths)))

    def start(self, beginning, sampling):
        return self._begun(self._start, sampling, beginning)

    def _begun(self, verb: Callable[..., DecodeState], sampling: SamplingParams, *given: Any) -> SteppedState:
        """Choose the first roots by a verb of the engine, under the constraints."""
        constraints, sampling = self._constraints(sampling, len(jax.tree.leaves(given)[0]))
        extra = self._first_masks(constraints)
        return SteppedState(verb(self.params, *given, self._placed(sampling), extra=extra), constraints)

    def parted(self, state):
        return state.decode, list(state.constraints)

    def joined(self, arrays, constraints):
        return SteppedState(arrays, tuple(constraints))

    def rewind(self, state, lengths, counts=None, states=()):
        return state._replace(decode=super().rewind(state.decode, lengths, counts, states))

    def target(self, state):
        return state.decode

    def advance(self, state, stopped, n_steps, *, until_one_ends=False):
        decode, constraints = state
        if not any(constraints):
            decode, now = super().advance(decode, stopped, n_steps, until_one_ends=until_one_ends)
            return SteppedState(decode, constraints), now
        work = self._host_work(constraints, stopped, n_steps, until_one_ends)
        work.follow(*jax.device_get(_to_follow(decode)))
        decode = self._in_three(decode, work) if self.host_calls is None else self._in_one_program(decode, work)
        decode = _with_ended(decode, self._placed(jnp.asarray(work.ended)))
        return SteppedState(decode, constraints), Snapshot.of(decode.output)

    def _in_three(self, decode: DecodeState, work: HostWork) -> DecodeState:
        """Step while the host works during the base's passes."""
        while work.running:
            ended, forced, plan = *self._placed((work.ended, work.forced)), work.plan
            masks = self.program.drafter.spec.fills_levels and plan is not Plan.FORCED
            first = self._placed(work.next_masks()) if masks else None
            proposal = self._propose(self.params, decode, forced, first, plan=plan)
            forward, logits = self._verify(self.params, decode.target.cache, proposal)
            extra = (AllowedTokens(self._placed(work.masks(*self._on_host(proposal)))),)
            decode = self._settle(self.params, decode, ended, forward, logits, proposal, extra, plan=plan)
            work.follow(*jax.device_get(_to_follow(decode)))
        return decode

    def _in_one_program(self, decode: DecodeState, work: HostWork) -> DecodeState:
        """Step in a program that calls the host."""
        batch, plans = len(work.ended), self._plans(len(work.ended))

        def mask(tokens, parents, allowed):
            tokens, parents = (x.view(np.int32).reshape(batch, -1).copy() for x in (tokens, parents))
            allowed.view(np.uint32)[:] = work.masks(tokens, parents).reshape(-1)

        def mask_after(paths, allowed):
            allowed = allowed.view(np.uint32).reshape(batch, -1, words(self.model.config.vocab_size))
            allowed[:] = work.masks_after(paths.view(np.int32).reshape(*allowed.shape[:2], -1).copy())

        def follow(done, lengths, roots, tokens, ended, forced, plan):
            tokens = tokens.view(np.int32).reshape(batch, -1)
            work.follow(done.view(bool), lengths.view(np.int32), roots.view(np.int32), tokens)
            ended.view(bool)[:], forced.view(np.int32)[:] = work.ended, work.forced.reshape(-1)
            plan.view(np.int32)[:] = plans.index(work.plan) if work.running else -1

        with self.host_calls.calling(mask, mask_after, follow) as entries:
            if work.running:
                given = self.params, decode, work.ended, work.forced.copy(), np.int32(plans.index(work.plan)), entries
                decode = jax.block_until_ready(self._steps(*given, plans=plans))
        return decode

    # --- the host's part ----------------------------------------------------------------------------------------------

    def _constraints(
        self, sampling: SamplingParams, batch: int
    ) -> tuple[tuple[Constraint | None, ...], SamplingParams]:
        """Return a new constraint of each sequence, and the sampling parameters without constraints."""
        given = sampling.constraints
        if given is None:
            given = self.constraints([self.request] * batch)
        return tuple(None if one is None else one.copy() for one in given), sampling._replace(constraints=None)

    def _host_work(self, constraints: Constraints, stopped, steps: int, until_one_ends: bool = False) -> HostWork:
        held = self.program.held_tokens if self.host_calls else 0  # three programs mask the first level only
        return HostWork(constraints, stopped, self.program, self.model.config.vocab_size, steps, held, until_one_ends)

    def _on_host(self, proposal: Proposal) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"]]:
        """Fetch tokens and parents of the nodes; the base's pass continues meanwhile."""
        parents = self.engine.program.tree.topology.parents if proposal.tree is None else proposal.tree.parents
        tokens, parents = jax.device_get((proposal.tokens, parents))
        return tokens, np.broadcast_to(parents, tokens.shape)

    def _first_masks(self, constraints: Constraints) -> tuple[AllowedTokens, ...]:
        """Return the masks of the token after a prompt, none without constraints."""
        if not any(constraints):
            return ()
        work = self._host_work(constraints, np.zeros(len(constraints), bool), 0)
        return (AllowedTokens(self._placed(work.next_masks())),)


def _with_ended(state: DecodeState, ended) -> DecodeState:
    return state._replace(output=state.output._replace(done=ended))


def _to_follow(state: DecodeState) -> tuple:
    """Return the arguments of `HostWork.follow`."""
    out = state.output
    return out.done, out.lengths, state.target.root, out.tokens
