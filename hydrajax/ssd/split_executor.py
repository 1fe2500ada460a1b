"""The split executor: base and draft on devices of their own. The host only hands on what each has to know of the
other, and waits for nothing but the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.decode import DecodeResult, settled_inputs
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.spec import DecodeSpec, SamplingParams
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.drafters.draft_model import DraftState
from hydrajax.drafters.drafter import Proposal
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.sharding import Placement
from hydrajax.ssd import fan_out as fan_outs
from hydrajax.ssd.draft_side import Carry, DraftSide, Verdict
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.record import Record
from hydrajax.trees.presets import chain

# How many rounds the host has handed to the devices before it asks whether an earlier one was the last.
ROUNDS_AHEAD = 1
PARTS = ("hand over", "verify", "prepare", "tell", "answer")  # of a round
Watch = Callable[[str, Any], None]


class SplitState(NamedTuple):
    """base: the base's part, on its devices; the drafter's in it is empty. draft: the draft's, on its devices."""

    base: DecodeState
    draft: Carry


class SplitExecutor(Executor):
    """A base and a draft model, each on devices of its own (speculative speculative decoding, docs/ssd.md).

    While the base verifies, the draft prepares for the outcomes of ``fan_out``. The tokens are those of the fused
    executor with the same spec and key, whatever is prepared.

    Attributes:
        placement: where base and draft lie.
        fan_out: the outcomes that are prepared for.
    """

    one_tree = True

    def __init__(
        self,
        model: BaseModel,
        params: Params,
        spec: DecodeSpec,
        *,
        placement: Placement,
        fan_out: FanOut | Sequence[int] | int | None = None,
        tokenizer: Any = None,
        room: int | None = None,
    ):
        """Build the executor; nothing is compiled.

        Args:
            model, params, spec, tokenizer, room: see `Executor`. The tree is a chain, the drafter a `DraftModel`
                without ``confidence``: heads read what the base makes of the very tokens whose verdict they would have
                to run ahead of.
            placement: where the parameters lie, with devices of the draft's own.
            fan_out: a `FanOut`, its counts for accept lengths 0 .. K, or one number of outcomes in all; None for
                `hydrajax.ssd.fan_out.default`, 0 for base and draft in turn.

        Raises:
            HydrajaxError: for another drafter, tree or placement.
        """
        _check(spec, placement)
        self.placement, self.fan_out = placement, _settled(fan_out, spec.tree.depth)
        super().__init__(model, params, spec, tokenizer=tokenizer, room=room)

    def _jit_verbs(self):
        # `Engine.of` has checked base and drafter together; what runs beside the base is the base alone.
        self.engine = engine = dataclasses.replace(self.engine, drafter=NoDrafter())
        self._side = side = DraftSide(self.spec.drafter, self.fan_out, engine.max_new_tokens)
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
        self._draft_read = on_draft(side.read, donate_argnums=1)
        self._draft_first = on_draft(side.first, donate_argnums=1)
        self._draft_rewind = on_draft(side.drafter.rewind, donate_argnums=0)
        self._prepare = on_draft(side.prepare)
        self._answer = on_draft(side.answer, donate_argnums=1)

    def target(self, state):
        return state.base

    # --- the verbs ----------------------------------------------------------------------------------------------------

    def prefill(self, prompt, lengths, sampling, slots=None):
        slots = self.engine.cache_slots(prompt.shape[1]) if slots is None else slots
        base = self._prefill(self._base, prompt, lengths, self._beside_base(sampling), slots)
        draft = jax.device_put(self._draft_init(len(prompt), slots), self._draft_home)
        return self._begun(base, self._read(draft, prompt, lengths))

    def extend(self, state, text, lengths, sampling):
        base = self._extend(self._base, state.base, text, lengths, self._beside_base(sampling))
        return self._begun(base, self._read(state.draft.state, text, lengths))

    def rewind(self, state, lengths, counts=None):
        base = self._rewind(state.base, lengths, counts)
        draft = self._draft_rewind(state.draft.state, jax.device_put(lengths, self._draft_home))
        return SplitState(base, state.draft._replace(state=draft))

    def advance(self, state, stopped, n_steps, watch: Watch = lambda *_: None):
        """See `Executor.advance`.

        watch: called with the name of every part of a round, one of `PARTS`, and what that part will give, as soon as a
            device has it to do. One that waits for the result puts all parts in turn, and can time them.
        """
        done: list[Array] = []
        for _ in range(n_steps):
            state, now_done = self._round(state, np.array(stopped), watch)
            done.append(now_done)
            # All so far was handed to the devices and returned at once. This waits for the round before the last.
            if len(done) > ROUNDS_AHEAD and np.asarray(done[-1 - ROUNDS_AHEAD]).all():
                break
        return state, Snapshot.of(state.base.output)

    def empty(self, batch, slots, sampling):
        base = self._empty(batch, slots, self._beside_base(sampling))
        base = jax.device_put(base, self._base_home)
        told = jax.device_put((base.output.keys, base.output.rule), self._draft_home)
        return SplitState(base, self._draft_empty(self._draft, batch, slots, *told))

    def feed(self, state, text, lengths, following):
        base = self._feed(self._base, state.base, text, lengths, following)
        return SplitState(base, state.draft._replace(state=self._read(state.draft.state, text, lengths)))

    def stay(self, state):
        lengths = jnp.array(state.base.target.cache.lengths, copy=True)
        return self.rewind(state, lengths)

    def abstract_state(self, batch, slots, sampling):
        def empty():
            base = self.engine.empty(batch, slots, sampling)
            draft = self._side.empty(self._draft, batch, slots, base.output.keys, base.output.rule)
            return SplitState(base, draft)

        return jax.eval_shape(empty)

    # --- a call, and what became of the preparations ------------------------------------------------------------------

    def decode(self, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None):
        return self.recorded(prompt, lengths, rng, limits, rule, processors)[0]

    def recorded(
        self,
        prompt,
        lengths=None,
        rng=None,
        limits=None,
        rule=None,
        processors=None,
        watch: Watch = lambda *_: None,
    ) -> tuple[DecodeResult, Record]:
        """`decode`, with the hits and misses of the preparations. watch: see `advance`."""
        given = settled_inputs(self.spec, self.model.config, prompt, lengths, rng, limits, rule, processors)
        state, _ = self.advance(self.prefill(*given), np.zeros(len(given.prompt), bool), self.room, watch)
        result = self._result(state.base.output)
        numbers = np.asarray(state.draft.record)[:, : self.room]
        return result, Record(numbers, np.asarray(result.accept_lengths), self.fan_out)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _beside_base(self, sampling: SamplingParams) -> SamplingParams:
        return sampling._replace(rng=jax.device_put(sampling.rng, self._base_home))

    def _read(self, draft: DraftState, text, lengths) -> DraftState:
        """The draft's state after more text, which the caller may have put beside the base."""
        return self._draft_read(self._draft, draft, *jax.device_put((text, lengths), self._draft_home))

    def _begun(self, base: DecodeState, draft: DraftState) -> SplitState:
        """Draft the first round after a text."""
        told = base.target.root, base.output.keys, base.output.rule, base.output.done
        told = jax.device_put(told, self._draft_home)
        return SplitState(base, self._draft_first(self._draft, draft, *told))

    def _round(
        self, state: SplitState, stopped: Bool[np.ndarray, " B"], watch: Watch
    ) -> tuple[SplitState, Bool[Array, " B"]]:
        """The states after one round, before they are computed, and which rows are then done."""
        # Each device starts when what it needs has come.
        carry = state.draft
        proposed = jax.device_put((carry.drafted.tokens, carry.drafted.log_q), self._base_home)
        watch("hand over", proposed)
        base, verdict = self._verify(self._base, state.base, *proposed, stopped)
        watch("verify", verdict)
        prepared = self._prepare(self._draft, carry) if self.fan_out.total else None
        watch("prepare", prepared)
        told = jax.device_put(verdict, self._draft_home)
        watch("tell", told)
        carry = self._answer(self._draft, carry, prepared, told)
        watch("answer", carry.drafted)
        return SplitState(base, carry), verdict.done

    def with_fan_out(self, fan_out: FanOut | Sequence[int] | int | None) -> SplitExecutor:
        """Return the same with other preparations."""
        return self._beside(self.spec, fan_out)

    def _remade(self, spec):
        return self._beside(spec, self.fan_out if spec.tree.depth == self.fan_out.depth else None)

    def _beside(self, spec: DecodeSpec, fan_out) -> SplitExecutor:
        return SplitExecutor(
            self.model, self.params, spec, placement=self.placement, fan_out=fan_out, tokenizer=self.tokenizer,
            room=self._wanted_room,
        )  # fmt: skip


def verify_round(
    engine: Engine,
    base: Params,
    state: DecodeState,
    tokens: Int[Array, "B chain"],
    log_q: Float[Array, "B K V"] | None,
    stopped: Bool[Array, " B"],
) -> tuple[DecodeState, Verdict]:
    """Verify, accept and commit a chain, if any row goes on."""
    state = state._replace(output=state.output._replace(done=state.output.done | stopped))
    proposal = Proposal(tokens, engine.tree.topology, log_q)

    def goes_on(carried):
        state, _, fresh = carried
        return fresh & ~jnp.all(state.output.done)

    def round_(carried):
        state, _, _ = carried
        forward, logits = engine.verify(base, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, outcome = engine.commit(state, forward, logits, proposal, accepted)
        return state, Verdict(outcome.counts, outcome.bonus_token, state.output.done), jnp.asarray(False)

    # A loop of at most one step: it leaves the cache where it is, which a `lax.cond` need not.
    before = Verdict(jnp.zeros_like(state.target.root), state.target.root, state.output.done)
    state, verdict, _ = jax.lax.while_loop(goes_on, round_, (state, before, jnp.asarray(True)))
    return state, verdict


def _program(n_devices: int, function: Callable, **settings: Any) -> Callable:
    """Compile for so many devices. A new function each time, as JAX keeps what it has traced by function."""

    def traced(*arguments):
        with backend.on_devices(n_devices):
            return function(*arguments)

    return jax.jit(traced, compiler_options=backend.compiler_options(), **settings)


def _check(spec: DecodeSpec, placement: Placement) -> None:
    """Refuse what cannot be split."""
    drafter, tree = spec.drafter, spec.tree
    if not placement.split:
        raise HydrajaxError("placement: must have devices for the draft alone, found none")
    if not drafter.spec.independent:
        raise HydrajaxError(
            f"draft_devices: are for a draft model, which does not read the base, found {title_of(drafter)}"
        )
    if drafter.confidence:
        raise HydrajaxError(f"draft_confidence: must be 0 with draft_devices, found {drafter.confidence}")
    if not tree.depth or getattr(tree, "choices", None) != chain(tree.depth).choices:
        raise HydrajaxError("tree: must be a chain with draft_devices, such as chain-4")


def _settled(fan_out: FanOut | int | Sequence[int] | None, depth: int) -> FanOut:
    if fan_out is None:
        return fan_outs.default(depth)
    if isinstance(fan_out, int):
        return fan_outs.of_budget(depth, fan_out)
    found = fan_out if isinstance(fan_out, FanOut) else FanOut(tuple(fan_out))
    if found.depth != depth:
        raise HydrajaxError(f"fan_out: must be {depth + 1} counts for a chain of {depth}, found {list(found.counts)}")
    return found
