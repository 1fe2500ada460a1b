"""Decode prompts in a batch of rows: a row that ends takes the next prompt, and few rows become a smaller batch."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from hydrajax.decoding.engine import Beginning
from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.inputs import Inputs
from hydrajax.decoding.keywords import rule_name
from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.decoding.request import Request, sampling_params
from hydrajax.decoding.rows import StateShapes, put_sequence
from hydrajax.errors import HydrajaxError
from hydrajax.sequences import growing_text, keys_of, remember, row_result
from hydrajax.text.answers import Generation
from hydrajax.text.stopping import GrowingText

T = TypeVar("T")
STEPS_PER_BURST = 8  # between two checks for stop strings


def inputs_of(
    executor: Executor, texts: Sequence[np.ndarray], requests: Sequence[Request], like: Sequence[Request] = ()
) -> Inputs:
    """Return a batch of prompts, padded to its bucket, with the sampling parameters of each.

    like: see `hydrajax.decoding.request.sampling_params`.
    """
    config = executor.model.config
    sampling = sampling_params(requests, keys_of(requests), config.vocab_size, like)
    sampling = sampling._replace(constraints=executor.constraints(requests))
    return Inputs(*right_padded(texts, bucket(max(map(len, texts)), config.max_positions)), sampling)


def compilation(executor: Executor, batch: int, width: int) -> str:
    """Describe the programs that a batch of prompts needs."""
    program = executor.program
    tree = f"a tree of {program.verified_nodes} nodes" if program.longest_path else "no tree"
    return f"compiling the rule {rule_name(program.rule)} with {tree} for {batch} x {width} prompt tokens"


class Row(NamedTuple):
    """A sequence in a row of the batch.

    Attributes:
        number: Of its prompt.
        text: The text so far.
        began: `RefilledBatch.seconds` at its prefill.
    """

    number: int
    text: GrowingText
    began: float


class RefilledBatch:
    """Prompts of any number, decoded in a batch of a few rows.

    Attributes:
        refills: A row takes the next prompt when its sequence ends. Not with a draft on its own devices, on several
            processes, or with rows that are sharded over a mesh: there the next prompts wait until all rows have ended.
        seconds: Spent decoding so far, without compilation.
    """

    def __init__(
        self,
        executor: Executor,
        texts: Sequence[np.ndarray],
        requests: Sequence[Request],
        batch_size: int,
        executor_for: Callable[[int], Executor] | None,
        on_status: Callable[[str], None],
    ):
        """Prepare; `results` decodes. The arguments are those of `hydrajax.generation.generate`, checked."""
        self._executor, self._texts, self._requests, self._on_status = executor, texts, requests, on_status
        self._kinds = list(dict.fromkeys(one.replace(seed=None, number=0) for one in requests))
        stops = any(request.stops for request in requests)
        self._most_steps = STEPS_PER_BURST if stops else executor.program.max_new_tokens
        self._executor_for = executor_for if executor.program.rule.same_output else None
        self._executors: dict[int, Executor] = {}
        self._sampling = self._inputs([0]).sampling._replace(rng=jax.random.key(0), constraints=None)
        grammars = any(one.grammar is not None for one in requests)
        self._structure = jax.tree.structure(self._sampling), grammars
        self._losing: tuple[dict[Any, float], Any] | None = None
        mesh = executor.mesh
        self.refills = not executor.one_tree and (
            mesh is None or (mesh.shape.get("data", 1) == 1 and not mesh.is_multi_process)
        )
        self.seconds = 0.0
        self._rows: list[Row | None] = [None] * batch_size
        self._waiting = deque(range(len(texts)))
        self._state: State = None
        self._width = 0  # of the longest prompt that the state has room for
        self._read: tuple[int, Beginning] | None = None  # the prompt that more sequences start from

    def results(self) -> Iterator[Generation]:
        """Yield the results in the order of the prompts, each as soon as it and all before it have ended."""
        ended: dict[int, Generation] = {}
        for number in range(len(self._texts)):
            while number not in ended:
                self._admit()
                self._shrink()
                ended |= self._advance()
            yield ended.pop(number)

    @property
    def _live(self) -> list[int]:
        return [at for at, row in enumerate(self._rows) if row is not None]

    # --- prompts take free rows ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting prompts take the free rows.

        If all rows are free, their prompts are prefilled together, in a new state. Otherwise, and for prompts most of
        which are the same as the one before, each is prefilled by itself, once for all that are the same.
        """
        if not self._live and self._waiting:
            self._state = None  # frees its memory
            some = list(itertools.islice(self._waiting, len(self._rows) + 1))
            new = [number for number in some if not (number and self._same(number, number - 1))]
            together = not self.refills or 2 * len(new) > len(some)
            longer_lived = self.refills and len(self._rows) > 1
            coming = self._waiting if longer_lived else some[: len(self._rows)]
            width = max(len(self._texts[number]) for number in coming)
            width = bucket(width, self._executor.model.config.max_positions)
            if width != self._width:
                self._width, self._read = width, None  # whose cache has another length
            if together:
                self._prefill()
        for at, row in enumerate(self._rows):
            if row is None and self._waiting and self.refills:
                self._start(at)

    def _same(self, number: int, other: int) -> bool:
        return np.array_equal(self._texts[number], self._texts[other])

    def _prefill(self) -> None:
        """Prefill a prompt for each row in a new state; repeated prompts fill it up."""
        batch, began = len(self._rows), self.seconds
        numbers = [self._waiting.popleft() for _ in range(min(batch, len(self._waiting)))]
        given = self._inputs([numbers[row % len(numbers)] for row in range(batch)])
        slots = None if given.prompt.shape[1] == self._width else self._slots(batch)
        if not self._executor.is_compiled(given, slots):
            self._on_status(compilation(self._executor, *given.prompt.shape))
        self._executor.compiled[self._steps(batch)] = self._executor.compile(given, slots)
        self._on_status("decoding")
        self._state = self._timed(lambda: self._executor.prefill(*given, slots=slots))
        for at, number in enumerate(numbers):
            self._seat(at, number, began)

    def _start(self, at: int) -> None:
        """Prefill the next prompt, unless that was done for the one before, and put it into a row."""
        number, began, batch = self._waiting.popleft(), self.seconds, len(self._rows)
        given = self._inputs([number])
        program = "start", self._state is None, given.prompt.shape, *self._steps(batch)
        self._state = self._timed(lambda: self._started(at, number, given), program)
        if not (self._waiting and self._same(number, self._waiting[0])):
            self._read = None
        self._seat(at, number, began)

    def _started(self, at: int, number: int, given: Inputs) -> State:
        executor = self._executor
        if self._read is None or not self._same(number, self._read[0]):
            self._read = None  # frees its memory
            self._read = number, executor.read(*given, slots=self._slots(len(self._rows)))
        return self._with(at, executor.start(self._read[1], given.sampling))

    def _with(self, at: int, sequence: State) -> State:
        """Return the state with a sequence in a row; without a state, all rows are copies, which take no step."""
        executor, batch = self._executor, len(self._rows)
        one, (constraint,) = executor.parted(sequence)
        if self._state is None:
            rows, constraints = self._shapes(batch).tile(one, batch, self._slots(batch)), [None] * batch
        else:
            rows, constraints = executor.parted(self._state)
            rows = put_sequence(rows, at, one)
        constraints[at] = constraint
        return executor.joined(rows, constraints)

    def _seat(self, at: int, number: int, began: float) -> None:
        text = growing_text(self._executor.tokenizer, self._requests[number], self._texts[number])
        self._rows[at] = Row(number, text, began)

    def _inputs(self, numbers: Sequence[int]) -> Inputs:
        texts, requests = ([values[number] for number in numbers] for values in (self._texts, self._requests))
        return inputs_of(self._executor, texts, requests, self._kinds)

    # --- few rows -----------------------------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Move the last sequences into a smaller batch, if at most half of the rows are live and no prompt waits.

        Its size is a power of two whose program is compiled. Another program is compiled when steps of too large
        batches have lost as much time as the compilation of the present one took: then it cannot cost more than twice
        what the best choice in hindsight would have cost. A step of half the rows counts as half a step.
        """
        live, batch = self._live, len(self._rows)
        if self._waiting or not self.refills or not 0 < 2 * len(live) <= batch:
            return
        sizes = [2**n for n in range(batch.bit_length()) if len(live) <= 2**n < batch]
        ready = [size for size in sizes if self._steps(size) in self._of(size).compiled]
        best, program = self._of(sizes[0]), self._steps(sizes[0])
        if not ready and best.lost[program] >= self._executor.compiled.get(self._steps(batch), 0.0):
            ready = sizes
        self._losing = None if ready else (best.lost, program)
        if ready:
            size, smaller = ready[0], self._of(ready[0])
            self._state = self._timed(lambda: self._moved(live, size), ("move", batch, *self._steps(size)))
            self._rows, self._executor = [self._rows[at] for at in live] + [None] * (size - len(live)), smaller

    def _moved(self, live: list[int], batch: int) -> State:
        """Return the state of the live rows in a smaller batch; other rows are copies, which take no step."""
        (rows, constraints), self._state = self._executor.parted(self._state), None
        others = batch - len(live)
        rows = self._shapes(batch).reshape(rows, live + live[:1] * others, self._slots(batch))
        return self._of(batch).joined(rows, [constraints[at] for at in live] + [None] * others)

    def _shapes(self, batch: int) -> StateShapes:
        return StateShapes(self._of(batch), self._sampling, (batch, self._slots(batch)))

    def _of(self, batch: int) -> Executor:
        """Return the executor for a batch size: the present one for the present size."""
        if self._executor_for is None or batch == len(self._rows):
            return self._executor
        if batch not in self._executors:
            found = self._executors[batch] = self._executor_for(batch)
            if found.program.replace(tree=self._executor.program.tree) != self._executor.program:
                raise HydrajaxError(
                    f"executor_for: got another program for {batch} rows, expected one that differs in its tree only"
                )
        return self._executors[batch]

    # --- steps --------------------------------------------------------------------------------------------------------

    def _advance(self) -> dict[int, Generation]:
        """Step until a sequence ends, or a burst; return the results of those that have ended."""
        executor, began = self._executor, self.seconds
        stopped, program = np.array([row is None for row in self._rows]), self._steps(len(self._rows))
        steps = self._most_steps if program in executor.compiled else 1
        self._state, now = self._timed(
            lambda: executor.advance(self._state, stopped, steps, until_one_ends=self.refills), program
        )
        if self._losing is not None:
            lost, smaller = self._losing
            lost[smaller] += (self.seconds - began) / 2
        ended = {}
        for at in self._live:
            number, text, since = self._rows[at]
            text.grow(now.tokens[at, : now.lengths[at]].tolist(), final=bool(now.done[at]))
            if now.done[at] or text.stopped:
                given = self._requests[number], self._texts[number], now, at, text, self.seconds - since
                ended[number], self._rows[at] = row_result(executor, *given), None
                remember(executor, ended[number])
        return ended

    def _slots(self, batch: int) -> int:
        return self._of(batch).engine.cache_slots(self._width)

    def _steps(self, batch: int) -> tuple[Any, ...]:
        """Return the key of the steps of a batch in `Executor.compiled`."""
        return "steps", batch, self._slots(batch), *self._structure

    def _timed(self, work: Callable[[], T], program: tuple[Any, ...] = ()) -> T:
        """Return the result of some work, whose seconds count unless it compiles this program."""
        compiled = self._executor.compiled
        compiles = program and program not in compiled
        if compiles:
            self._on_status(compilation(self._executor, len(self._rows), self._width))
        began = time.perf_counter()
        found = jax.block_until_ready(work())
        seconds = time.perf_counter() - began
        if compiles:
            compiled[program] = seconds
            self._on_status("decoding")
        else:
            self.seconds += seconds
        return found
