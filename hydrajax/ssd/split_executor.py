"""The split executor of speculative speculative decoding: base and draft model on separate devices.

The host dispatches programs and transfers asynchronously, and waits only for the end of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax import ops
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request, SamplingParams
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.drafters.draft_model import DraftState
from hydrajax.drafters.drafter import Proposal
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.ops import trace
from hydrajax.sharding import Placement
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.record import SpeculationRecord
from hydrajax.ssd.speculator import Speculator, SpeculatorState, VerificationOutcome
from hydrajax.trees.presets import chain

ROUNDS_AHEAD = 1  # rounds that the host dispatches before it checks whether an earlier round was the last
PARTS = ("hand over", "verify", "prepare", "tell", "answer")  # of a round, in order
Watch = Callable[[str, Any], None]


class SplitState(NamedTuple):
    """The base's state on its devices, with an empty drafter state, and the speculator's on the draft devices."""

    base: DecodeState
    draft: SpeculatorState


class SplitExecutor(Executor):
    """Decode with a base and a draft model on separate devices (docs/ssd.md).

    While the base verifies, the draft model fills a speculation cache for the outcomes of ``fan_out``. The tokens equal
    those of the fused executor with the same program, request and key.
    """

    one_tree = True

    def __init__(
        self,
        model: BaseModel,
        params: Params,
        program: Program,
        request: Request | None = None,
        *,
        placement: Placement,
        fan_out: FanOut | Sequence[int] | int | None = None,
        tokenizer: Any = None,
    ):
        """Build the executor; nothing is compiled.

        Args:
            model, params, program, request, tokenizer: see `Executor`. The tree must be a chain and the drafter a
                `DraftModel` without ``confidence``: heads read the base's hidden states, so they cannot run ahead.
            placement: devices of the parameters, with separate devices for the draft.
            fan_out: a `FanOut`, its counts for accept lengths 0 .. K, or a total number of outcomes; None for
                `FanOut.from_budget`, 0 for base and draft in turn.

        Raises:
            HydrajaxError: for another drafter, tree or placement.
        """
        _check(program, placement)
        self.placement, self.fan_out = placement, _as_fan_out(fan_out, program.tree.depth)
        super().__init__(model, params, program, request, tokenizer=tokenizer)

    def _jit_verbs(self):
        # The base devices run the base alone.
        self.engine = engine = Engine(self.model, self.program.replace(drafter=NoDrafter()))
        self._speculator = side = Speculator(self.program.drafter, self.fan_out, self.program.max_new_tokens)
        self._base, self._draft = Params(self.params.base, {}), self.params.draft
        self._base_home, self._draft_home = homes = self.placement.homes()
        on_base, on_draft = (functools.partial(_program, len(home.device_set)) for home in homes)
        self._prefill = on_base(lambda *given: engine.prefill(*given[:4], slots=given[4]), static_argnums=4)
        self._extend = on_base(engine.extend, donate_argnums=1)
        self._rewind = on_base(engine.rewind, donate_argnums=0)
        self._empty = on_base(engine.empty, static_argnums=(0, 1))
        self._feed = on_base(engine.feed, donate_argnums=1)
        self._verify = on_base(functools.partial(verify_round, engine), donate_argnums=1)
        self._draft_init = on_draft(side.drafter.init_state, static_argnums=(0, 1))
        self._draft_empty = on_draft(side.empty, static_argnums=(1, 2))
        self._draft_feed = on_draft(side.feed, donate_argnums=1)
        self._draft_begin = on_draft(side.begin, donate_argnums=1)
        self._draft_rewind = on_draft(side.drafter.rewind, donate_argnums=0)
        self._prepare = on_draft(side.prepare)
        self._resolve = on_draft(side.resolve, donate_argnums=1)

    def target(self, state):
        return state.base

    # --- the verbs ----------------------------------------------------------------------------------------------------

    def prefill(self, prompt, lengths, sampling, slots=None):
        slots = self.engine.cache_slots(prompt.shape[1]) if slots is None else slots
        base = self._prefill(self._base, prompt, lengths, self._on_base(sampling), slots)
        draft = jax.device_put(self._draft_init(len(prompt), slots), self._draft_home)
        return self._begun(base, self._feed_draft(draft, prompt, lengths))

    def extend(self, state, text, lengths, sampling):
        base = self._extend(self._base, state.base, text, lengths, self._on_base(sampling))
        return self._begun(base, self._feed_draft(state.draft.draft, text, lengths))

    def rewind(self, state, lengths, counts=None, states=()):
        base = self._rewind(state.base, lengths, counts, states)
        draft = self._draft_rewind(state.draft.draft, jax.device_put(lengths, self._draft_home))
        return SplitState(base, state.draft._replace(draft=draft))

    def advance(self, state, stopped, n_steps, watch: Watch = lambda *_: None, *, until_one_ends=False):
        """See `Executor.advance`.

        Args:
            watch: called with the name of each part of a round (`PARTS`) and its result, when the part is dispatched.
                A callback that waits for the result serialises the parts and can time them.
        """
        done: list[Array] = []
        ended_before = np.asarray(state.base.output.done) | stopped
        for _ in range(n_steps):
            state, now_done = self._round(state, np.array(stopped), watch)
            done.append(now_done)
            # Dispatch returns at once; this waits for the last round but one.
            if len(done) > ROUNDS_AHEAD:
                known = np.asarray(done[-1 - ROUNDS_AHEAD])
                if known.all() or (until_one_ends and (known & ~ended_before).any()):
                    break
        return state, Snapshot.of(state.base.output)

    def empty(self, batch, slots, sampling):
        base = self._empty(batch, slots, self._on_base(sampling))
        base = jax.device_put(base, self._base_home)
        settings = jax.device_put((base.output.keys, base.output.rule), self._draft_home)
        return SplitState(base, self._draft_empty(self._draft, batch, slots, *settings))

    def feed(self, state, text, lengths, following):
        base = self._feed(self._base, state.base, text, lengths, following)
        return SplitState(base, state.draft._replace(draft=self._feed_draft(state.draft.draft, text, lengths)))

    def stay(self, state):
        lengths = jnp.array(state.base.target.cache.lengths, copy=True)
        return self.rewind(state, lengths)

    def abstract_state(self, batch, slots, sampling):
        def empty():
            with trace.on_devices(len(self._base_home.device_set)):
                base = self.engine.empty(batch, slots, sampling)
            with trace.on_devices(len(self._draft_home.device_set)):
                draft = self._speculator.empty(self._draft, batch, slots, base.output.keys, base.output.rule)
            return SplitState(base, draft)

        return jax.eval_shape(empty)

    # --- a call, with hits and misses ---------------------------------------------------------------------------------

    def decode(self, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None):
        return self.recorded(prompt, lengths, rng, limits, rule, processors)[0]

    def recorded(
        self, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None, watch: Watch = lambda *_: None
    ) -> tuple[DecodeResult, SpeculationRecord]:
        """Like `decode`; also return the hits and misses of the speculation cache. ``watch``: see `advance`."""
        given, room = self._settled(prompt, lengths, rng, limits, rule, processors), self.program.max_new_tokens
        state, _ = self.advance(self.prefill(*given), np.zeros(len(given.prompt), bool), room, watch)
        result = self._result(state.base.output)
        numbers = np.asarray(state.draft.record)[:, :room]
        return result, SpeculationRecord(numbers, np.asarray(result.accept_lengths), self.fan_out)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _on_base(self, sampling: SamplingParams) -> SamplingParams:
        return sampling._replace(rng=jax.device_put(sampling.rng, self._base_home))

    def _feed_draft(self, draft: DraftState, text, lengths) -> DraftState:
        """Feed tokens that may be on the base devices to the draft model."""
        return self._draft_feed(self._draft, draft, *jax.device_put((text, lengths), self._draft_home))

    def _begun(self, base: DecodeState, draft: DraftState) -> SplitState:
        """Draft the first round after a prefill."""
        start = base.target.root, base.output.keys, base.output.rule, base.output.done
        return SplitState(base, self._draft_begin(self._draft, draft, *jax.device_put(start, self._draft_home)))

    def _round(
        self, state: SplitState, stopped: Bool[np.ndarray, " B"], watch: Watch
    ) -> tuple[SplitState, Bool[Array, " B"]]:
        """Dispatch one round; return the states and the done flags, which may not be computed yet."""
        speculator = state.draft
        proposed = jax.device_put((speculator.speculation.tokens, speculator.speculation.log_q), self._base_home)
        watch("hand over", proposed)
        base, outcome = self._verify(self._base, state.base, *proposed, stopped)
        watch("verify", outcome)
        cache = self._prepare(self._draft, speculator) if self.fan_out.total else None
        watch("prepare", cache)
        sent = jax.device_put(outcome, self._draft_home)
        watch("tell", sent)
        speculator = self._resolve(self._draft, speculator, cache, sent)
        watch("answer", speculator.speculation)
        return SplitState(base, speculator), outcome.done

    def with_fan_out(self, fan_out: FanOut | Sequence[int] | int | None) -> SplitExecutor:
        """Return the same executor with another fan-out."""
        return self._with(self.program, self.request, fan_out)

    def _remade(self, program, request):
        return self._with(program, request, self.fan_out if program.tree.depth == self.fan_out.depth else None)

    def _with(self, program: Program, request: Request, fan_out) -> SplitExecutor:
        given = self.model, self.params, program, request
        return SplitExecutor(*given, placement=self.placement, fan_out=fan_out, tokenizer=self.tokenizer)


def verify_round(
    engine: Engine,
    base: Params,
    state: DecodeState,
    tokens: Int[Array, "B chain"],
    log_q: Float[Array, "B K V"] | None,
    stopped: Bool[Array, " B"],
) -> tuple[DecodeState, VerificationOutcome]:
    """Verify, accept and commit a chain, unless all sequences have finished."""
    state = state._replace(output=state.output._replace(done=state.output.done | stopped))
    proposal = Proposal(tokens, engine.program.tree.topology, log_q)

    def continues(carried):
        state, _, fresh = carried
        return fresh & ~jnp.all(state.output.done)

    def round_(carried):
        state, _, _ = carried
        forward, logits = engine.verify(base, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, found = engine.commit(state, forward, logits, proposal, accepted)
        outcome = VerificationOutcome(found.counts, found.bonus_token, state.output.done)
        return state, outcome, jnp.asarray(False)

    # A loop of at most one step updates the cache in place; a `lax.cond` may copy it.
    before = VerificationOutcome(jnp.zeros_like(state.target.root), state.target.root, state.output.done)
    state, outcome, _ = jax.lax.while_loop(continues, round_, (state, before, jnp.asarray(True)))
    return state, outcome


def _program(n_devices: int, function: Callable, **settings: Any) -> Callable:
    """Compile for ``n_devices``, as a new function each time: JAX caches traces by function."""

    def traced(*arguments):
        with trace.on_devices(n_devices):
            return function(*arguments)

    return jax.jit(traced, compiler_options=ops.compiler_options(), **settings)


def _check(program: Program, placement: Placement) -> None:
    """Refuse drafters, trees and placements that cannot be split."""
    drafter, tree = program.drafter, program.tree
    if not placement.split:
        raise HydrajaxError("placement: got no devices for the draft alone; give it a draft mesh")
    if not drafter.spec.independent:
        raise HydrajaxError(f"draft_devices: got {title_of(drafter)}, expected a draft model; heads read the base")
    if drafter.confidence:
        raise HydrajaxError(f"draft_confidence: got {drafter.confidence}, expected 0 with draft_devices")
    if not tree.depth or getattr(tree, "choices", None) != chain(tree.depth).choices:
        raise HydrajaxError("tree: got a tree that is no chain, expected a chain with draft_devices, such as chain-4")


def _as_fan_out(fan_out: FanOut | int | Sequence[int] | None, depth: int) -> FanOut:
    if fan_out is None:
        return FanOut.from_budget(depth)
    if isinstance(fan_out, int):
        return FanOut.from_budget(depth, fan_out)
    found = fan_out if isinstance(fan_out, FanOut) else FanOut(tuple(fan_out))
    if found.depth != depth:
        raise HydrajaxError(f"fan_out: got {list(found.counts)}, expected {depth + 1} counts for a chain of {depth}")
    return found
