"""Base and draft on devices of their own: the host only hands on what each has to know of the other, and waits for
nothing but the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.decode import DecodeResult, Inputs, check_fit, make_engine, result_of, settled_inputs
from hydrajax.decoding.loop import Snapshot, next_burst
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.decoding.step import Engine
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import Drafter, Proposal
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.registry import title_of
from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.base import BaseModel
from hydrajax.ssd import fan_out as fan_outs
from hydrajax.ssd.draft_side import MISS, Carry, DraftSide, Verdict
from hydrajax.ssd.fan_out import FanOut
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.presets import chain

ROUNDS_AHEAD = (
    1  # how many rounds the host has handed to the devices before it asks whether an earlier one was the last
)

PARTS = ("hand over", "verify", "prepare", "tell", "answer")  # of a round
Watch = Callable[[str, Any], None]


class Record:
    """What became of the preparations of one call, read from `hydrajax.ssd.draft_side.Carry.record`.

    numbers: int32 ``[B, rounds]``, for every round after which a row went on the number of the prepared outcome that
    came about, -1 where none did, -2 where the row took no such round. accept_lengths: int32 ``[B, rounds]`` of these
    rounds. fan_out: what was prepared.
    """

    def __init__(self, numbers: np.ndarray, accept_lengths: np.ndarray, fan_out: FanOut):
        self.numbers, self.accept_lengths, self.fan_out = numbers, accept_lengths, fan_out

    @property
    def rounds(self) -> int:
        """Over all rows."""
        return int((self.numbers >= MISS).sum())

    @property
    def hits(self) -> int:
        return int((self.numbers >= 0).sum())

    @property
    def hit_rate(self) -> float:
        """The share of the rounds after which the row's next draft was ready; 0 if there were none."""
        return self.hits / max(self.rounds, 1)

    @property
    def ready_rate(self) -> float:
        """The share of the rounds of the whole batch after which nobody had to wait: no row that goes on missed."""
        went_on = (self.numbers >= MISS).any(axis=0)
        return float((self.numbers != MISS).all(axis=0)[went_on].mean()) if went_on.any() else 0.0

    def outcomes(self) -> Float[np.ndarray, "accept rank"]:
        """How often each prepared outcome came about, by accept length and rank, in the last column any other."""
        fan_out = self.fan_out
        found = np.zeros((fan_out.depth + 1, max(fan_out.counts) + 1))
        known = self.numbers[self.numbers >= 0]
        np.add.at(found, (fan_out.accept_lengths[known], fan_out.ranks[known]), 1)
        np.add.at(found, (self.accept_lengths[self.numbers == MISS], -1), 1)
        return found


class Programs(NamedTuple):
    """The compiled functions of base (the first two) and draft."""

    start: Callable
    verify: Callable
    read: Callable
    first: Callable
    prepare: Callable
    answer: Callable


class ApartFn:
    """What `make_apart_fn` gives. Calling it decodes; `recorded` says besides what became of the preparations."""

    def __init__(self, engine: Engine, drafter: DraftModel, rule: AcceptanceRule, fan_out: FanOut):
        self.engine, self.rule, self.fan_out = engine, rule, fan_out
        self.side = DraftSide(drafter, fan_out, engine.max_new_tokens)
        self._result = jax.jit(result_of)
        self._programs: dict[tuple[int, int], Programs] = {}

    def programs(self, n_base: int = 1, n_draft: int = 1) -> Programs:
        """For so many devices on each side. Nothing is compiled before it is called."""
        if (n_base, n_draft) not in self._programs:
            engine, side = self.engine, self.side

            def program(count: int, function: Callable, **settings):
                # A function of its own for every number of devices, as JAX keeps what it has traced by function.
                def traced(*arguments):
                    with backend.on_devices(count):
                        return function(*arguments)

                return jax.jit(traced, compiler_options=backend.compiler_options(), **settings)

            self._programs[n_base, n_draft] = Programs(
                start=program(n_base, engine.prefill),
                verify=program(n_base, self._verified, donate_argnums=1),
                read=program(n_draft, side.read, static_argnums=3),
                first=program(n_draft, side.first, donate_argnums=1),
                prepare=program(n_draft, side.prepare),
                answer=program(n_draft, side.answer, donate_argnums=1),
            )
        return self._programs[n_base, n_draft]

    def __call__(self, params: Params, prompt, lengths=None, rng=None, limits=None, rule=None) -> DecodeResult:
        """See `hydrajax.decoding.decode.make_decode_fn`."""
        return self._decoded(params, prompt, lengths, rng, limits, rule, lambda *_: None)[0]

    def recorded(
        self, params: Params, prompt, lengths=None, rng=None, limits=None, rule=None, watch: Watch = lambda *_: None
    ) -> tuple[DecodeResult, Record]:
        """The same, with what became of the preparations.

        watch: is told the name of every part of a round, one of `PARTS`, and what it will give, as soon as it has been
        handed to a device. One that waits for that puts all parts in turn, and can time them.
        """
        result, carry = self._decoded(params, prompt, lengths, rng, limits, rule, watch)
        numbers = np.asarray(carry.record)[:, : self.engine.max_new_tokens]
        return result, Record(numbers, np.asarray(result.accept_lengths), self.fan_out)

    def _decoded(self, params, prompt, lengths, rng, limits, rule, watch: Watch):
        given = settled_inputs(
            self.engine.model.config, self.rule, self.engine.max_new_tokens, prompt, lengths, rng, limits, rule
        )
        done: list[Array] = []
        for now in self._rounds(params, given, np.zeros(len(given.prompt), bool), watch):
            done.append(now[2])
            # All so far was handed to the devices and returned at once. This waits for the round before the last.
            if len(done) > ROUNDS_AHEAD and np.asarray(done[-1 - ROUNDS_AHEAD]).all():
                break
        state, carry, _ = now
        return self._result(state.output), carry

    def _rounds(
        self, params: Params, given: Inputs, stopped: Bool[np.ndarray, " B"], watch: Watch = lambda *_: None
    ) -> Iterator[tuple[DecodeState, Carry, Bool[Array, " B"]]]:
        """The states of base and draft after each round, before they are computed, and which rows are then done.

        The next round donates both states. Rows that the caller sets in ``stopped`` emit nothing from the next on.
        """
        base_home, draft_home = homes(params)
        base, run = Params(params.base, {}), self.programs(*(len(home.device_set) for home in (base_home, draft_home)))
        given = given._replace(rng=jax.device_put(given.rng, base_home))
        state = run.start(base, *given)
        text = jax.device_put((given.prompt, given.lengths), draft_home)  # the caller may have put it beside the base
        draft_state = run.read(params.draft, *text, self.engine.cache_slots(given.prompt.shape[1]))
        told = state.target.root, state.output.keys, state.output.rule, state.output.done
        carry = run.first(params.draft, draft_state, *jax.device_put(told, draft_home))
        while True:
            # Each device starts when what it needs has come.
            proposed = jax.device_put((carry.drafted.tokens, carry.drafted.log_q), base_home)
            watch("hand over", proposed)
            state, verdict = run.verify(base, state, *proposed, np.array(stopped))
            watch("verify", verdict)
            prepared = run.prepare(params.draft, carry) if self.fan_out.total else None
            watch("prepare", prepared)
            told = jax.device_put(verdict, draft_home)
            watch("tell", told)
            carry = run.answer(params.draft, carry, prepared, told)
            watch("answer", carry.drafted)
            yield state, carry, verdict.done

    # --- as `hydrajax.decoding.loop.Bursts` ---------------------------------------------------------------------------

    def compile(self, params: Params, prompt, lengths, keys, rule: AcceptanceRule, limits) -> None:
        """Compile for inputs of these shapes, by one round."""
        given = Inputs(prompt, lengths, keys, rule, np.minimum(limits, 1))
        jax.block_until_ready(next(self._rounds(params, given, np.zeros(len(prompt), bool)))[:2])

    def run(
        self, params: Params, prompt, lengths, keys, rule: AcceptanceRule, limits, *, n_steps: int | None, stopped
    ) -> Iterator[Snapshot]:
        """See `Bursts.run`. The devices have nothing to do while a snapshot is looked at."""
        steps, taken, began = n_steps or 1, 0, time.perf_counter()
        done: list[Array] = []
        for state, _, now_done in self._rounds(params, Inputs(prompt, lengths, keys, rule, limits), stopped):
            taken += 1
            done.append(now_done)
            over = len(done) > ROUNDS_AHEAD and np.asarray(done[-1 - ROUNDS_AHEAD]).all()
            if taken < steps and not over:
                continue
            now = Snapshot(*jax.device_get(tuple(getattr(state.output, name) for name in Snapshot._fields)))
            steps, taken = n_steps or next_burst(steps, time.perf_counter() - began), 0
            yield now
            if (now.done | stopped).all():
                return
            began = time.perf_counter()

    def _verified(
        self,
        base: Params,
        state: DecodeState,
        tokens: Int[Array, "B chain"],
        log_q: Float[Array, "B K V"] | None,
        stopped: Bool[Array, " B"],
    ) -> tuple[DecodeState, Verdict]:
        """Verify, accept and commit, if any row goes on."""
        engine = self.engine
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
            return state, Verdict(outcome.counts, outcome.next_root, state.output.done), jnp.asarray(False)

        # A loop of at most one step: it leaves the cache where it is, which a `lax.cond` need not.
        before = Verdict(jnp.zeros_like(state.target.root), state.target.root, state.output.done)
        state, verdict, _ = jax.lax.while_loop(goes_on, round_, (state, before, jnp.asarray(True)))
        return state, verdict


def make_apart_fn(
    model: BaseModel,
    drafter: Drafter,
    tree: CandidateTree,
    rule: AcceptanceRule | None = None,
    *,
    fan_out: FanOut | int | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    eos_ids: tuple[int, ...] = (),
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> ApartFn:
    """Build a decode function for a base and a draft model on devices of their own; see `hydrajax.make_decode_fn`.

    The device sets are those on which ``params.base`` and ``params.draft`` lie (`hydrajax.load` with
    ``draft_devices``). While the base verifies, the draft prepares for the outcomes of ``fan_out``. The tokens are
    those of `make_decode_fn` with the same rule and key, whatever is prepared.

    tree: a chain. drafter: a `DraftModel` without ``confidence``; heads read what the base makes of the very tokens
        whose verdict they would have to run ahead of.
    fan_out: a `FanOut`, its counts for accept length 0 .. K, or one number of outcomes in all; None for
        `hydrajax.ssd.fan_out.default`, 0 for base and draft in turn.

    The result decodes as a function of ``(params, prompt, lengths=None, rng=None, limits=None, rule=None)`` does that
    `make_decode_fn` gives, but is driven by the host and cannot be called under `jax.jit`. Its ``recorded`` also
    returns a `Record` of hits and misses.

    Raises `HydrajaxError` for another drafter or tree, and when called with parameters that share a device.
    """
    rule = rule or Greedy()
    if not drafter.spec.independent:
        raise HydrajaxError(
            f"draft_devices: are for a draft model, which does not read the base, found {title_of(drafter)}"
        )
    if drafter.confidence:
        raise HydrajaxError(f"draft_confidence: must be 0 with draft_devices, found {drafter.confidence}")
    check_fit(drafter, tree, rule, model.config.vocab_size)
    if not tree.depth or getattr(tree, "choices", None) != chain(tree.depth).choices:
        raise HydrajaxError("tree: must be a chain with draft_devices, such as chain-4")
    settings = {"max_new_tokens": max_new_tokens, "eos_ids": tuple(eos_ids), "logprobs": logprobs}
    settings["top_logprobs"] = top_logprobs
    engine = Engine(model, NoDrafter(), tree, **settings)
    make_engine(model, drafter, tree, rule, **settings)  # refuses what it refuses
    return ApartFn(engine, drafter, rule, _settled(fan_out, tree.depth))


def _settled(fan_out: FanOut | int | Sequence[int] | None, depth: int) -> FanOut:
    if fan_out is None:
        return fan_outs.default(depth)
    if isinstance(fan_out, int):
        return fan_outs.of_budget(depth, fan_out)
    found = fan_out if isinstance(fan_out, FanOut) else FanOut(tuple(fan_out))
    if found.depth != depth:
        raise HydrajaxError(f"fan_out: must be {depth + 1} counts for a chain of {depth}, found {list(found.counts)}")
    return found


def are_apart(params: Params) -> bool:
    """Whether a draft has parameters, and all of them on other devices than the base."""
    first = [leaf for part in params for leaf in jax.tree.leaves(part)[:1]]
    if len(first) < 2 or any(isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) for x in first):
        return False  # nothing to place, or nothing that is placed
    return not _home(params.base).device_set & _home(params.draft).device_set


def homes(params: Params) -> tuple[Sharding, Sharding]:
    """Where arrays of the base's side and of the draft's side belong: one device, or all of its mesh.

    Raises `HydrajaxError` if the two have a device in common.
    """
    base, draft = (_home(part) for part in params)
    shared = base.device_set & draft.device_set
    if shared:
        names = ", ".join(sorted(map(str, shared)))
        raise HydrajaxError(f"draft_devices: base and draft must lie on devices of their own, both are on {names}")
    return base, draft


def _home(params: Any) -> Sharding:
    home = jax.tree.leaves(params)[0].sharding
    return NamedSharding(home.mesh, PartitionSpec()) if isinstance(home, NamedSharding) else home
