"""Executors carry out a `Program`: prefill, extend, rewind and advance a batch of sequences.

Everything that generates, serves or measures takes an executor and does not depend on where arrays lie. `FusedExecutor`
runs base and draft in one program. `hydrajax.decoding.stepped.SteppedExecutor` needs the host in every step.
`hydrajax.ssd.split_executor.SplitExecutor` runs base and draft on devices of their own.
"""

from __future__ import annotations

import abc
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from hydrajax import ops
from hydrajax.decoding.constraints import Constraint
from hydrajax.decoding.decode import DecodeResult, decode_programs, refuse_grammar, result_of
from hydrajax.decoding.decode_loop import Snapshot, next_burst, run_steps
from hydrajax.decoding.engine import Beginning, Engine
from hydrajax.decoding.inputs import Inputs, settled_inputs
from hydrajax.decoding.processing import TokenCounts
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request, SamplingParams
from hydrajax.decoding.state import DecodeState, OutputState, Params, ParamsCheck
from hydrajax.errors import HydrajaxError
from hydrajax.host_memory import into_huge_pages
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.models.cache import KVCache, States, states_of
from hydrajax.processes import agreed
from hydrajax.sharding import by_rows, jit_on, on_mesh

OtherExecutor = TypeVar("OtherExecutor", bound="Executor")
State = Any  # a pytree of arrays whose first axis is the batch: `DecodeState`, or what another executor makes of it


class Executor(abc.ABC):
    """A base, its draft and a program.

    Prompts and text are int32 ``[B, T]``, right-padded, with their lengths int32 ``[B]``. A verb that takes a state
    donates it. Every shape compiles once; other values of sampling parameters do not recompile.

    Attributes:
        model: The base.
        params: Parameters of base and drafter.
        program: The compiled configuration.
        request: The default of calls without a request.
        tokenizer: The base's (transformers); None if it has none.
        engine: The verbs as pure functions.
        compiled: Seconds that each compilation took, by shape.
        lost: Seconds that steps of larger batches took longer because a shape was not compiled.
        mesh: The parameters' mesh, over whose ``data`` axis the sequences are sharded; None for one device.
        one_tree: The states fit only this executor's own tree.
        follows_grammars: Requests may have grammars.
    """

    one_tree: ClassVar[bool] = False
    follows_grammars: ClassVar[bool] = False

    def __init__(
        self,
        model: BaseModel,
        params: Params,
        program: Program,
        request: Request | None = None,
        *,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
    ):
        """Build the executor; nothing is compiled yet.

        Args:
            model: The base.
            params: Parameters of base and drafter.
            program: What is compiled.
            request: The default of calls without a request; None for `Program.request`.
            tokenizer: The base's.
            mesh: The parameters' mesh. The sequences of a batch are sharded over its ``data`` axis.

        Raises:
            HydrajaxError: If base, parameters, program and request do not fit each other.
        """
        self.model, self.params, self.program, self.tokenizer, self.mesh = model, params, program, tokenizer, mesh
        self.request = request or program.request()
        self.check(self.request)
        program.check(model.config)
        ParamsCheck(model, program.drafter)(params)
        into_huge_pages(jax.tree.leaves(params))
        self.engine = Engine(model, program)
        self.compiled: dict[Any, float] = {}
        self.lost: defaultdict[Any, float] = defaultdict(float)
        self._result = self._jit(result_of)
        self._snapshot = self._jit(snapshot_of)
        self._jit_verbs()

    def _jit(self, function: Callable, **settings: Any) -> Any:
        return jit_on(self.mesh, function, **settings)

    def _jit_verbs(self) -> None:
        engine = self.engine
        self._prefill = self._jit(engine.prefill, static_argnames="slots")
        self._extend = self._jit(engine.extend, donate_argnums=1)
        self._rewind = self._jit(engine.rewind, donate_argnums=0)
        self._empty = self._jit(engine.empty, static_argnums=(0, 1))
        self._feed = self._jit(engine.feed, donate_argnums=1)
        self._read = self._jit(engine.read, static_argnames="slots")
        self._start = self._jit(engine.start)
        self._stay = self._jit(lambda state: engine.rewind(state, state.target.cache.lengths), donate_argnums=0)

    def check(self, request: Request) -> None:
        """Raise `HydrajaxError` for a request that the program does not serve."""
        if not self.follows_grammars:
            refuse_grammar(self.program.grammars or request.grammar)
        if type(request.rule) is not self.program.rule:
            raise HydrajaxError(f"rule: got {request.rule}, expected {self.program.rule.__name__}")
        request.check(self.model.config.vocab_size)

    # --- the four verbs -----------------------------------------------------------------------------------------------

    def prefill(
        self,
        prompt: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        sampling: SamplingParams,
        slots: int | None = None,
    ) -> State:
        """Prefill base and draft and choose the first root. Nothing is emitted yet.

        Args:
            prompt: int32 ``[B, P]``.
            lengths: int32 ``[B]``.
            sampling: Keys, rule, processors and limits.
            slots: Slots of the caches: more than `Engine.cache_slots` if `extend` is to follow.
        """
        prompt, lengths, sampling = self._placed((prompt, lengths, sampling))
        return self._prefill(self.params, prompt, lengths, sampling, slots=slots)

    def extend(
        self, state: State, text: Int[Array, "B T"], lengths: Int[Array, " B"], sampling: SamplingParams
    ) -> State:
        """Prefill more text, such as the next message of a conversation. See `Engine.extend`."""
        return self._extend(self.params, state, *self._placed((text, lengths, sampling)))

    def rewind(
        self, state: State, lengths: Int[Array, " B"], counts: TokenCounts | None = None, states: States = ()
    ) -> State:
        """Cut each sequence to its first tokens; `extend` or `feed` must follow. See `Engine.rewind`."""
        return self._rewind(state, lengths, counts, states)

    def snapshot(self, state: State) -> States:
        """Copy the states of the base's recurrent layers, which `rewind` takes; empty without such layers."""
        return self._snapshot(self.target(state).target.cache)

    @abc.abstractmethod
    def advance(
        self, state: State, stopped: Bool[np.ndarray, " B"], n_steps: int, *, until_one_ends: bool = False
    ) -> tuple[State, Snapshot]:
        """Take at most ``n_steps`` decode steps.

        Args:
            state: of the sequences; it is donated.
            stopped: sequences that take no step.
            n_steps: the most steps; fewer if all sequences end.
            until_one_ends: end with the step in which any sequence ends.
        """

    # --- prompts that several sequences begin with --------------------------------------------------------------------

    def read(
        self, prompt: Int[Array, "B P"], lengths: Int[Array, " B"], sampling: SamplingParams, slots: int | None = None
    ) -> Beginning:
        """Prefill prompts from which any number of sequences can `start`. See `Engine.read`."""
        prompt, lengths, sampling = self._placed((prompt, lengths, sampling._replace(constraints=None)))
        return self._read(self.params, prompt, lengths, sampling, slots=slots)

    def start(self, beginning: Beginning, sampling: SamplingParams) -> State:
        """Start a sequence after each prompt, which is not donated. See `Engine.start`."""
        return self._start(self.params, beginning, self._placed(sampling))

    def parted(self, state: State) -> tuple[DecodeState, list[Constraint | None]]:
        """Return the arrays of a state and the constraint of each sequence."""
        return state, [None] * len(state.output.lengths)

    def joined(self, arrays: DecodeState, constraints: Sequence[Constraint | None]) -> State:
        """Return the state of `parted`."""
        return arrays

    # --- prefill in chunks, for servers -------------------------------------------------------------------------------

    def empty(self, batch: int, slots: int, sampling: SamplingParams) -> State:
        """Return sequences without text. See `Engine.empty`."""
        return self._placed(self._empty(batch, slots, sampling))

    def feed(
        self, state: State, text: Int[Array, "B T"], lengths: Int[Array, " B"], following: Int[Array, " B"]
    ) -> State:
        """Prefill a chunk that is not the last one. See `Engine.feed`."""
        return self._feed(self.params, state, *self._placed((text, lengths, following)))

    def abstract_state(self, batch: int, slots: int, sampling: SamplingParams) -> State:
        """Return the shapes of `empty` without allocating them."""
        with on_mesh(self.mesh):
            return jax.eval_shape(lambda: self.engine.empty(batch, slots, sampling))

    def stay(self, state: State) -> State:
        """Rewind each sequence to its present length, which updates draft state that depends on the number of slots."""
        return self._stay(state)

    def constraints(self, requests: Sequence[Request]) -> tuple[Constraint | None, ...] | None:
        """Return the constraints of sequences with these requests; None if this executor follows no grammars.

        Raises:
            HydrajaxError: For a grammar that the tokenizer or llguidance refuses, and for any that is not followed.
        """
        if not self.follows_grammars:
            for request in requests:
                refuse_grammar(request.grammar)
            return None
        given = self.tokenizer, self.model.config.vocab_size, self.program.eos_ids
        return tuple(None if one.grammar is None else one.grammar.start(*given) for one in requests)

    def _placed(self, of_rows: Any) -> Any:
        """Shard arrays whose first axis is the batch over the mesh's data axis, so that their state is sharded too."""
        return of_rows if self.mesh is None else by_rows(self.mesh, of_rows)

    # --- shared by all executors --------------------------------------------------------------------------------------

    def target(self, state: State) -> DecodeState:
        """Return the base's part of the state."""
        return state

    def output(self, state: State) -> OutputState:
        return self.target(state).output

    def run(self, given: Inputs, stopped: Bool[np.ndarray, " B"], n_steps: int | None = None) -> Iterator[Snapshot]:
        """Decode, and yield a snapshot after every ``n_steps`` steps, the last when every sequence has ended.

        Args:
            given: Prompts padded to a bucket, and sampling parameters.
            stopped: Set an element between two snapshots to end that sequence early.
            n_steps: Steps per snapshot. None for streamed text: one step first, then as many as `next_burst` returns.
        """
        state, steps = self.prefill(*given), n_steps or 1
        while True:
            began = time.perf_counter()
            state, now = self.advance(state, stopped, steps)
            seconds = time.perf_counter() - began  # the reader's own time does not count
            steps = n_steps or agreed(self.mesh, partial(next_burst, steps, seconds))
            yield now
            if (now.done | stopped).all():
                return

    def decode(self, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None) -> DecodeResult:
        """Decode to the end. The arguments are those of a decode function (`hydrajax.decoding.decode.DecodeFn`)
        without parameters; results have as many columns as the program has room.
        """
        given = self._settled(prompt, lengths, rng, limits, rule, processors)
        state, _ = self.advance(self.prefill(*given), np.zeros(len(given.prompt), bool), self.program.max_new_tokens)
        return self._result(self.output(state))

    def _settled(self, *given: Any) -> Inputs:
        return settled_inputs(self.program, self.model.config, *given, request=self.request)

    def is_compiled(self, given: Inputs, slots: int | None = None) -> bool:
        """Return whether `compile` has compiled for inputs of these shapes."""
        return _shapes(given, slots) in self.compiled

    def compile(self, given: Inputs, slots: int | None = None) -> float:
        """Compile for inputs of these shapes, unless that was done, so that `run` does not; return the seconds it took.

        slots: as for `prefill`.
        """
        if not self.is_compiled(given, slots):
            began = time.perf_counter()
            self._compile(given, slots)
            self.compiled[_shapes(given, slots)] = time.perf_counter() - began
        return self.compiled[_shapes(given, slots)]

    def _compile(self, given: Inputs, slots: int | None) -> None:
        """Compile by taking one step."""
        one = given._replace(sampling=given.sampling._replace(limits=np.ones_like(given.lengths)))
        state = self.prefill(*one, slots=slots)
        jax.block_until_ready(self.advance(state, np.zeros(len(given.prompt), bool), 1)[0])

    # --- derived executors ------------------------------------------------------------------------------------

    def with_program(self, program: Program | None = None, request: Request | None = None, **changes: Any) -> Executor:
        """Return an executor of another program, or of the present one with changes, for the same parameters.

        It shares the compiled programs if it is the same program.

        Args:
            program: By default the present one.
            request: By default the present one.
            changes: Fields of the program to replace; ``max_new_tokens`` is also the request's limit.
        """
        program = (program or self.program).replace(**changes)
        if (request := request or self.request) is self.request and "max_new_tokens" in changes:
            request = request.replace(max_new_tokens=program.max_new_tokens)
        if program != self.program:
            return self._remade(program, request)
        self.check(request)
        found = copy.copy(self)
        found.request = request
        return found

    def with_request(self, request: Request | None = None, **changes: Any) -> Executor:
        """Return an executor with another request, or with fields of the present one replaced.

        It shares the compiled programs, unless the kind of rule is another one.
        """
        request = (request or self.request).replace(**changes)
        return self.with_program(request=request, rule=type(request.rule))

    def _remade(self, program: Program, request: Request) -> Executor:
        return type(self)(self.model, self.params, program, request, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        """Keyword arguments of executors of other programs."""
        return {"tokenizer": self.tokenizer, "mesh": self.mesh}

    def autoregressive(self) -> Executor:
        """Return the autoregressive baseline: the base without a draft, and the rule of the same meaning.

        It follows the grammar of the request, one token at a time.
        """
        kind, program = type(self) if self.follows_grammars else FusedExecutor, self.program.autoregressive()
        return self.of_kind(kind, program, Params(self.params.base, {}), program.fitting(self.request))

    def of_kind(
        self, kind: type[OtherExecutor], program: Program, params: Params | None = None, request: Request | None = None
    ) -> OtherExecutor:
        """Return an executor of another kind with the same devices and tokenizer."""
        return kind(self.model, self.params if params is None else params, program, request, **self._settings)


class FusedExecutor(Executor):
    """Base and draft in one program: `advance` and `decode` are one `jax.lax.while_loop` each."""

    def _jit_verbs(self):
        super()._jit_verbs()
        engine = self.engine

        def burst(params: Params, state: DecodeState, stopped, n_steps, until_one_ends):
            output = state.output._replace(done=state.output.done | stopped)
            return run_steps(engine, params, state._replace(output=output), n_steps, until_one_ends)

        self._advance = self._jit(burst, donate_argnums=1, compiler_options=ops.compiler_options())
        self._decode, _ = decode_programs(engine)

    def advance(self, state, stopped, n_steps, *, until_one_ends=False):
        state = self._advance(self.params, state, np.array(stopped), np.int32(n_steps), np.bool_(until_one_ends))
        return state, Snapshot.of(state.output)

    def decode(self, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None):
        given = self._settled(prompt, lengths, rng, limits, rule, processors)
        with on_mesh(self.mesh):
            return self._decode(self.params, *self._placed(given))

    def _compile(self, given, slots):
        prefill = self._prefill.lower(self.params, *self._placed(given), slots=slots)
        prefill.compile()
        stopped = np.zeros(len(given.prompt), bool)
        self._advance.lower(self.params, prefill.out_info, stopped, np.int32(0), np.bool_(False)).compile()


def snapshot_of(cache: KVCache) -> States:
    return jax.tree.map(jnp.copy, states_of(cache))  # the cache is donated to the next program


def _shapes(given: Inputs, slots: int | None) -> Any:
    leaves, treedef = jax.tree.flatten(given)
    return treedef, tuple(np.shape(leaf) for leaf in leaves), slots
