"""The executors of a batcher, and the few batch sizes and cache lengths that they are compiled for."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import jax
import numpy as np

from hydrajax.decoding.batching import with_all_effects
from hydrajax.decoding.constraints import Constraint
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor, FusedExecutor, State
from hydrajax.decoding.host_work import AnyText
from hydrajax.decoding.keywords import RULES
from hydrajax.decoding.processing import PROCESSORS, TokenCounts
from hydrajax.decoding.processors import MinTokens
from hydrajax.decoding.program import FORCED_NODES, Program
from hydrajax.decoding.prompt_batch import SMALLEST_BUCKET, bucket, right_padded
from hydrajax.decoding.request import Request, SamplingParams, sampling_params
from hydrajax.decoding.rows import StateShapes, put_sequence
from hydrajax.decoding.state_snapshots import StateSnapshots
from hydrajax.decoding.stepped import SteppedExecutor, SteppedState
from hydrajax.drafters.left_out import LeftOut, Unread
from hydrajax.errors import HydrajaxError
from hydrajax.models.cache import States
from hydrajax.ops import trace
from hydrajax.sequences import keys_of
from hydrajax.serve.programs import Kind, Programs, ProgramShape
from hydrajax.serve.prompt_chunks import chunks_of
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

MISSED_TOKENS = 64  # that a draft reads again: its guesses hardly depend on earlier ones
# The smallest padded length of a prompt's last chunk, and the next ones over it. On a CPU the time grows with the
# length; elsewhere some hundred tokens take as long as one, and a program takes longer to compile.
LAST_CHUNKS, LAST_CHUNKS_ON_CPU = (SMALLEST_BUCKET, 4), (8, 2)
USUAL_PROMPT = 64  # tokens of a chat's first question
SNAPSHOTS = 3  # of a prompt: before its end, where it leaves an earlier text, where a turn ended


@dataclass(frozen=True)
class PoolSizes:
    """The limits of a pool.

    Attributes:
        slots: sequences that run at once.
        chunk: prompt tokens per prefill chunk.
        cache_len: smallest cache length; larger ones double it.
        penalties: support penalties and minimum lengths, which count tokens.
        rule: name of the acceptance rule of all requests.
        logprobs: number of most likely tokens whose log-probabilities are kept at each output position.
        snapshots: of recurrent layers' states that each sequence keeps for the prefix cache.
    """

    slots: int = 8
    chunk: int = 256
    cache_len: int = 256
    penalties: bool = False
    logprobs: int = 0
    rule: str = "exact"
    snapshots: int = SNAPSHOTS


class ExecutorPool:
    """The executors of one served model, one per batch size.

    Attributes:
        program: what a sequence alone is decoded with.
        neutral: a request that all others have the structure of: greedy, full context.
        no_snapshots: those of an empty text.
        programs: which of them are compiled.
    """

    def __init__(
        self,
        executor: Executor,
        sizes: PoolSizes,
        tree_for: Callable[[int], CandidateTree] | None = None,
        *,
        drops_draft: bool = False,
    ):
        """Build the executors.

        Args:
            executor: base and draft; the rule and the room of its program, and its request, are ignored.
            sizes: limits.
            tree_for: the tree for a batch size; the executor's own tree by default.
            drops_draft: also build executors for plain steps and for prompts that the draft does not read.

        Raises:
            HydrajaxError: for a tree that does not suit the drafter, and for sizes below 1.
        """
        for name in ("slots", "chunk", "cache_len"):
            if getattr(sizes, name) < 1:
                raise HydrajaxError(f"{name}: got {getattr(sizes, name)}, expected at least 1")
        config, self.sizes = executor.model.config, sizes
        self.context, self._vocab_size = config.max_positions, config.vocab_size
        self.no_snapshots = StateSnapshots.of(config, sizes.snapshots)
        self.chunk = bucket(min(sizes.chunk, self.context), self.context)
        self.batches = _geometric(1, sizes.slots, 2)
        smallest, growth = LAST_CHUNKS_ON_CPU if trace.on_cpu() else LAST_CHUNKS
        self.last_chunks = _geometric(min(smallest, self.chunk), self.chunk, growth)  # padded lengths
        self._caught_up = max(width for width in self.last_chunks if width <= max(MISSED_TOKENS, self.last_chunks[0]))
        own = executor.program.tree
        trees = {batch: own if tree_for is None else tree_for(batch) for batch in self.batches}
        kind = RULES[sizes.rule]
        if executor.one_tree or not kind.same_output:  # else the output would depend on the batch
            trees, drops_draft = dict.fromkeys(trees, trees[1]), False
        self.neutral = neutral = Request(kind(**getattr(kind, "SERVED", {})), max_new_tokens=self.context)
        self.program: Program = executor.program.serving(neutral).replace(tree=trees[1], logprobs=sizes.logprobs)
        made = {tree: executor.with_program(self.program, neutral, tree=tree) for tree in dict.fromkeys(trees.values())}
        self._speculative = {batch: made[tree] for batch, tree in trees.items()}
        self._plain = None
        if drops_draft and any(each.engine.depth for each in made.values()):
            drafter = LeftOut(self.program.drafter)
            self._plain = executor.with_program(self.program, neutral, drafter=drafter, tree=presets.root())
        # Prefilled states have room for the paths of every tree, and of forced tokens.
        self._prefill = max(made.values(), key=lambda each: each.engine.depth)
        self._constrained: dict[int, SteppedExecutor] = {}
        if isinstance(executor, FusedExecutor):
            self._prefill = self._prefill.with_program(forced_nodes=FORCED_NODES)
            for batch, each in self._speculative.items():
                program = each.program.replace(forced_nodes=FORCED_NODES)
                self._constrained[batch] = executor.of_kind(SteppedExecutor, program, request=neutral)
        unread = self._prefill
        if self._plain is not None:
            unread = self._prefill.with_program(drafter=Unread(self.program.drafter))
        self._prefills = {True: self._prefill, False: unread}  # by whether the draft reads the text
        # A mask of the first token, which without a grammar allows all, costs less than a second program per shape.
        self._masked = {
            read: executor.of_kind(SteppedExecutor, each.program, request=neutral) if self._constrained else each
            for read, each in self._prefills.items()
        }
        # All requests have one pytree structure: every sampling parameter is an array, neutral if unused.
        processors = [
            with_all_effects(each) for each in PROCESSORS.values() if sizes.penalties or not each.counts_tokens
        ]
        if self.program.eos_ids and sizes.penalties:
            processors.append(MinTokens(1, self.program.eos_ids))
        self._like = [
            neutral,
            Request(with_all_effects(kind), processors, ignore_eos=bool(self.program.eos_ids)),
        ]
        self._neutral = self.sampling(neutral)._replace(rng=jax.random.key(0))
        self.headroom = max(each.program.verified_nodes for each in (*made.values(), *self._constrained.values()))
        longest = self.context + max(self.headroom, self.chunk)
        self.cache_lens = _geometric(min(sizes.cache_len, longest), longest, 2)
        largest = sizes.slots, self.cache_lens[-1]
        self.shapes = StateShapes(self._prefill, self._neutral, largest, sizes.snapshots)
        self.programs = Programs(self._compile)
        self._warms_up, self._lock = False, threading.Lock()
        self._moved: list[int] = []  # cache lengths between which sequences have been moved, guarded by the lock

    @property
    def executor(self) -> Executor:
        """The executor of batch size 1."""
        return self._speculative[1]

    @property
    def drops_draft(self) -> bool:
        """True if plain steps are possible."""
        return self._plain is not None

    def longest_path(self, constrained: bool = False) -> int:
        """Return the most tokens that a step emits per sequence."""
        made = self._constrained if constrained else self._speculative
        return 1 + max(each.engine.depth for each in made.values())

    def candidates(self, batch: int, constrained: bool) -> int:
        """Return the nodes per sequence that a speculative step can accept, without a draft 0."""
        program = self._speculative[batch].program
        drafted = program.drafter.spec.candidate_nodes(program.tree) - 1
        return drafted + FORCED_NODES if drafted and constrained else drafted

    @property
    def nodes(self) -> int:
        """Tokens per sequence that a step feeds to the base, root included."""
        return self.program.verified_nodes

    def step_programs(self, batch: int, cache_len: int, constrained: Collection[bool]) -> list[ProgramShape]:
        """Return the programs that a batch of this shape needs: ``constrained`` holds True if any of its sequences has
        a constraint, and False if any has none, which may outlast the others.
        """
        kinds = {False: Kind.SPECULATIVE, True: Kind.CONSTRAINED}
        return [ProgramShape(kinds[each], cache_len, batch) for each in (False, True) if each in constrained]

    def begin_constrained(self, length: int) -> None:
        """Begin to compile the steps of one sequence with a constraint after a prompt of this length."""
        longest = min(length + self.longest_path(True), self.context)
        self.programs.ready(self.step_programs(1, self.cache_len_for(longest + self.headroom), {True}))

    def prefill_programs(
        self, start: int, length: int, read: bool = True, stops: Sequence[int] = ()
    ) -> list[ProgramShape]:
        """Return the programs that prefill a prompt from token ``start`` on.

        Args:
            start: the first token.
            length: of the prompt.
            read: the draft reads it too.
            stops: where a chunk must end.
        """
        last, feed = (Kind.PREFILL, Kind.FEED) if read else (Kind.UNREAD_PREFILL, Kind.UNREAD_FEED)
        cache_len, found = self.prefill_cache_len(start, length, stops), []
        for chunk in chunks_of(start, length, self.chunk, stops):
            found.append(ProgramShape(feed if chunk.full else last, cache_len, self._padded(chunk.until - chunk.start)))
        return list(dict.fromkeys(reversed(found)))

    def can_be_plain(self, batch: int, cache_len: int) -> bool:
        """Return whether steps of this shape may be plain."""
        return self.drops_draft and self._spares([ProgramShape(Kind.PLAIN, cache_len, batch)])

    def can_be_unread(self, start: int, length: int, stops: Sequence[int] = ()) -> bool:
        """Return whether the draft may miss a prompt from token ``start`` on."""
        return self.drops_draft and self._spares(self.prefill_programs(start, length, False, stops))

    def _spares(self, programs: Sequence[ProgramShape]) -> bool:
        """Return whether programs that others can replace are compiled. A warm-up compiles them in its own order."""
        return all(program in self.programs for program in programs) or (
            not self._warms_up and self.programs.ready(programs)
        )

    @property
    def follows_grammars(self) -> bool:
        """True if requests may have grammars, which need base and draft on the same devices."""
        return bool(self._constrained)

    def advance(
        self,
        state: State,
        cache_len: int,
        stopped: np.ndarray,
        steps: int,
        speculative: bool,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[State, Snapshot]:
        """Take at most ``steps`` steps, fewer if a sequence ends; ``cache_len`` is that of the state.

        If any sequence has a constraint, every step returns to the host.
        """
        batch = len(stopped)
        if any(constraints):
            constrained = SteppedState(state, tuple(constraints))
            constrained, found = self._constrained[batch].advance(constrained, stopped, steps, until_one_ends=True)
            return constrained.decode, found
        executor = self._speculative[batch] if speculative or self._plain is None else self._plain
        return executor.advance(state, stopped, steps, until_one_ends=True)

    def sampling(self, request: Request) -> SamplingParams:
        """Return the sampling arrays of one sequence; raises `HydrajaxError` for a token id outside the vocabulary."""
        return sampling_params([request], keys_of([request]), self._vocab_size, self._like)

    def batch_for(self, sequences: int) -> int:
        """Return the smallest batch size that holds ``sequences``."""
        return next(batch for batch in self.batches if batch >= sequences)

    def cache_len_for(self, tokens: int) -> int:
        """Return the smallest cache length for ``tokens``, including those fed in a step."""
        return next(cache_len for cache_len in self.cache_lens if cache_len >= tokens)

    def nbytes(self, sequences: int, tokens: int) -> int:
        """Return the bytes of a batch whose longest sequence has ``tokens``."""
        return self.shapes.nbytes(self.batch_for(sequences), self.cache_len_for(tokens + self.headroom))

    def prefill_nbytes(self, length: int) -> int:
        """Return the most bytes that the prefill of a prompt takes."""
        return self.shapes.nbytes(1, self.cache_len_for(length + max(self.headroom, self.chunk)))

    # --- prefill ----------------------------------------------------------------------------------------------

    def prefill_cache_len(self, start: int, length: int, stops: Sequence[int] = ()) -> int:
        """Return the cache length for prefill from token ``start`` on; chunks are padded."""
        chunks = chunks_of(start, length, self.chunk, stops)
        ends = (chunk.start + self._padded(chunk.until - chunk.start) for chunk in chunks)
        return self.cache_len_for(max((length + self.headroom, *ends)))

    def _padded(self, tokens: int) -> int:
        return next(width for width in self.last_chunks if width >= tokens)

    def empty(self, cache_len: int) -> State:
        return self._prefill.empty(1, cache_len, self._neutral)

    def rewind(self, state: State, length: int, ids: np.ndarray, states: States = ()) -> State:
        """Cut a state of batch size 1, which is donated, to its first ``length`` tokens, which are those of ``ids``.

        states: of the recurrent layers there, see `hydrajax.decoding.engine.Engine.rewind`.
        """
        counts = TokenCounts.of_text(ids[:length], self._vocab_size) if self.sizes.penalties else None
        return self._prefill.rewind(state, np.array([length], np.int32), counts, states)

    def snapshot(self, state: State) -> States:
        """Copy the states of the recurrent layers."""
        return self._prefill.snapshot(state)

    def feed(self, state: State, ids: np.ndarray, following: int, read: bool = True) -> State:
        """Prefill a full chunk that the token ``following`` follows; ``state`` is donated. read: by the draft too."""
        text, lengths = right_padded([ids], self.chunk)
        return self._prefills[read].feed(state, text, lengths, np.array([following], np.int32))

    def finish(
        self,
        state: State,
        ids: np.ndarray,
        request: Request,
        constraint: Constraint | None = None,
        read: bool = True,
    ) -> State:
        """Prefill the last chunk, after which the sequence can join a batch; ``state`` is donated.

        Also an earlier chunk that is not full, for which the draft takes the base's choice for the next token.

        read: by the draft too, as always with a constraint.
        """
        text, lengths = right_padded([ids], self._padded(len(ids)))
        sampling = self.sampling(request)
        if not self._constrained:
            return self._masked[read].extend(state, text, lengths, sampling)
        sampling = sampling._replace(constraints=(constraint or AnyText([]),))
        return self._masked[read].extend(SteppedState(state, (None,)), text, lengths, sampling).decode

    def read_from(self, read: int, length: int) -> int:
        """Return the first token of a text that the draft reads next, if it has read the first ``read`` tokens."""
        return max(read, length - self._caught_up)

    def catch_up(self, state: State, slot: int, ids: np.ndarray, read: int, cache_len: int) -> State:
        """Let the draft of one slot read the end of the text ``ids``, of which it has read the first ``read`` tokens.

        The base runs these tokens once more for the draft; its own state stays. ``state`` is donated. Recurrent layers
        start from the text's end, as earlier states are gone; only guesses depend on that.
        """
        start = self.read_from(read, len(ids))
        one = self.shapes.take(state, slot, self.prefill_cache_len(start, len(ids)))
        one = self.finish(self.rewind(one, start, ids), ids[start:], self.neutral)
        return self._with_draft(state, slot, one, cache_len)

    def _with_draft(self, state: State, slot: int, sequence: State, cache_len: int) -> State:
        """Replace the draft's state of a slot; ``state`` is donated."""
        return state._replace(draft=put_sequence(state.draft, slot, self.shapes.fitted(sequence, cache_len).draft))

    # --- compilation ------------------------------------------------------------------------------------------

    def all_programs(self) -> list[ProgramShape]:
        """Return every program, the most wanted first, for a warm-up.

        From now on, steps are plain and prompts unread only in shapes that are compiled.

        Small batches of short sequences come first, and one of them under a grammar. Plain steps and unread prompts, in
        whose place others are taken until then, follow, then the other steps under grammars.
        """
        found: list[ProgramShape] = []
        shapes = sorted(itertools.product(self.batches, self.cache_lens), key=math.prod)
        constrained = []
        if self._constrained and find_spec("llguidance"):
            constrained = [ProgramShape(Kind.CONSTRAINED, cache_len, batch) for batch, cache_len in shapes]
        for batch, cache_len in shapes:
            prefills = [] if batch > 1 else self._prefills_of(cache_len, Kind.PREFILL, Kind.FEED)
            found += [ProgramShape(Kind.SPECULATIVE, cache_len, batch), *prefills]
            found += [each for each in constrained if (batch, cache_len) == shapes[0] == (each.size, each.cache_len)]
        self._warms_up = True
        if self.drops_draft:
            found += [ProgramShape(Kind.PLAIN, cache_len, batch) for batch, cache_len in shapes]
            for cache_len in self.cache_lens:
                found += self._prefills_of(cache_len, Kind.UNREAD_PREFILL, Kind.UNREAD_FEED)
        return [*found, *constrained[1:]]

    def _prefills_of(self, cache_len: int, last: Kind, feed: Kind) -> list[ProgramShape]:
        usual_first = sorted(self.last_chunks, key=lambda width: abs(math.log(width / USUAL_PROMPT)))
        found = [ProgramShape(last, cache_len, width) for width in usual_first if width <= cache_len]
        return [*found, ProgramShape(feed, cache_len, self.chunk)] if cache_len > self.chunk else found

    def warm_up(self) -> None:
        """Compile every program."""
        for program in self.all_programs():
            self.programs.compile(program)

    def _compile(self, program: ProgramShape) -> None:
        """Compile a program by running it on an empty state."""
        kind, cache_len, size = program
        with self._lock:
            if cache_len not in self._moved:
                for other in self._moved:
                    self.shapes.take(self._blank(cache_len), 0, other)
                    self.shapes.take(self._blank(other), 0, cache_len)
                self._moved.append(cache_len)
        match kind:
            case Kind.PREFILL | Kind.UNREAD_PREFILL:
                ids, read = np.zeros(size, np.int32), kind is Kind.PREFILL
                self.finish(self._blank(cache_len), ids, self.neutral, read=read)
            case Kind.FEED | Kind.UNREAD_FEED:
                empty = self.rewind(self.empty(cache_len), 0, np.zeros(0, np.int32))
                self.feed(empty, np.zeros(self.chunk, np.int32), 0, kind is Kind.FEED)
            case Kind.CONSTRAINED:
                self._compile_constrained(size, cache_len)
            case _:
                self._compile_steps(size, cache_len, kind is Kind.SPECULATIVE)

    def _compile_steps(self, batch: int, cache_len: int, speculative: bool) -> None:
        """Compile steps, in which no sequence takes part."""
        state = self.shapes.tile(self._blank(cache_len), batch, cache_len)
        self._compile_moves(*self.advance(state, cache_len, np.ones(batch, bool), 1, speculative)[:1], cache_len)

    def _compile_constrained(self, batch: int, cache_len: int) -> None:
        """Compile steps in which every sequence has a constraint, by one step of every plan."""
        for constraint in self._constrained[batch].stand_ins():
            state = self.shapes.tile(self._blank(cache_len), batch, cache_len)
            output = state.output._replace(limits=state.output.limits + 1, done=~state.output.done)
            state = state._replace(output=output)
            state, _ = self.advance(state, cache_len, np.zeros(batch, bool), 1, True, (constraint,) * batch)
        self._compile_moves(state, cache_len)

    def _compile_moves(self, state: State, cache_len: int) -> None:
        """Compile the moves into and out of a batch, whose state is donated."""
        batch, one = len(jax.tree.leaves(state)[0]), self._blank(cache_len)
        state = self.shapes.put(state, 0, one, cache_len)
        if self.drops_draft:
            state = self._with_draft(state, 0, self._blank(cache_len), cache_len)
        self.shapes.take(state, batch - 1, cache_len)
        self.shapes.reshape(self.shapes.tile(one, batch, cache_len), range(batch), cache_len)

    def _blank(self, cache_len: int) -> State:
        """Return a sequence without text, whose arrays lie on the same devices as those of a prefilled one."""
        ids = np.zeros(0, np.int32)
        one = self.rewind(self.empty(cache_len), 0, ids)
        return self.rewind(one, 0, ids, self.snapshot(one))


def _geometric(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Geometric sizes from ``first`` to ``last``, without one close to ``last``."""
    found = [first]
    while found[-1] < last:
        following = factor * found[-1]
        found.append(following if 1.5 * following <= last else last)
    return tuple(found)
