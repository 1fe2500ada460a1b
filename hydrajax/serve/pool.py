"""The executors that a batcher runs, and the few shapes that they run in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.acceptance import ExactSampling
from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.processors import LogitBias, Penalties, TokenCounts
from hydrajax.decoding.prompt_batch import SMALLEST_BUCKET, bucket, right_padded
from hydrajax.decoding.spec import DecodeSpec, SamplingParams, sampling_params
from hydrajax.errors import HydrajaxError
from hydrajax.serve.shapes import Shapes, put_row
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree


@dataclass(frozen=True)
class Sizes:
    """The limits of a batcher.

    rows: most requests that run at once. chunk: tokens of a prompt that are read between two steps. places: of the
    smallest cache; larger ones have twice as many, and again. penalties: whether requests may have some. logprobs:
    of how many of the base's likeliest tokens a row keeps the log-probabilities, at every place of its output.
    """

    rows: int = 8
    chunk: int = 256
    places: int = 256
    penalties: bool = False
    logprobs: int = 0


class Pool:
    """The executors of one served model, one for each batch size; each compiles when it is first used.

    Attributes:
        spec: what requests change: the rule, processors, and limits. Greedy, with all of the context.
        executor: of a batch of one.
    """

    def __init__(
        self,
        executor: Executor,
        sizes: Sizes,
        tree_for: Callable[[int], CandidateTree] | None = None,
        *,
        drops_draft: bool = False,
    ):
        """Build the executors.

        Args:
            executor: decodes; rule, processors and limits of its spec do not matter.
            sizes: limits.
            tree_for: the tree for a batch size; by default the executor's own for all of them.
            drops_draft: also have an executor for steps without the draft.

        Raises:
            HydrajaxError: for a tree that the drafter cannot fill, and for sizes below 1.
        """
        for name in ("rows", "chunk", "places"):
            if getattr(sizes, name) < 1:
                raise HydrajaxError(f"{name}: must be at least 1, found {getattr(sizes, name)}")
        config, self.sizes = executor.model.config, sizes
        self.context, self._vocab_size = config.max_positions, config.vocab_size
        self.chunk = bucket(min(sizes.chunk, self.context), self.context)
        self.batches = _growing(1, sizes.rows, 2)
        self.widths = _growing(min(SMALLEST_BUCKET, self.chunk), self.chunk, 4)  # of a prompt's last piece
        own = executor.spec.tree
        trees = {batch: own if tree_for is None else tree_for(batch) for batch in self.batches}
        if executor.one_tree:
            trees, drops_draft = dict.fromkeys(trees, trees[1]), False
        self.spec = executor.spec.replace(
            tree=trees[1],
            rule=ExactSampling(temperature=0.0),
            processors=(),
            max_new_tokens=self.context,
            logprobs=sizes.logprobs,
        )
        plain = [presets.root()] if drops_draft else []
        made = {
            tree: executor.with_spec(self.spec.replace(tree=tree)) for tree in dict.fromkeys([*trees.values(), *plain])
        }
        self._drafting = {batch: made[tree] for batch, tree in trees.items()}
        # The drafter goes on reading what is emitted, so that it can be asked again.
        self._plain = made[presets.root()] if drops_draft and len(made) > 1 else None
        # Prompts are read into states that have room for the paths of every tree.
        self._reads = max(made.values(), key=lambda each: each.engine.depth)
        # All requests have one structure: every number is an array, with an effect or without.
        counted = [Penalties(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)]
        every = ExactSampling(1.0, top_k=1, top_p=0.5, min_p=0.5)
        self._like = [
            self.spec,
            self.spec.replace(rule=every, processors=[LogitBias({0: 1.0}), *(counted if sizes.penalties else [])]),
        ]
        self._nothing = self.sampling(self.spec, jax.random.key(0))
        self.shapes = Shapes(self._reads, self._nothing)
        self.longest_path = self._reads.engine.depth + 1
        self.spare = max(each.spec.verified_nodes for each in made.values())
        most = self.context + max(self.spare, self.chunk)
        self.places = _growing(min(sizes.places, most), most, 2)

    @property
    def executor(self) -> Executor:
        return self._drafting[1]

    @property
    def drops_draft(self) -> bool:
        """Whether steps can be taken without the draft."""
        return self._plain is not None

    def executor_for(self, rows: int, drafted: bool) -> Executor:
        """Return the executor of a batch of this size, with the draft or without."""
        return self._drafting[rows] if drafted or self._plain is None else self._plain

    def sampling(self, spec: DecodeSpec, keys) -> SamplingParams:
        """Return the numbers of one row. Raises `HydrajaxError` for a token id outside the vocabulary."""
        return sampling_params([spec], keys, self._vocab_size, self._like)

    @property
    def nodes(self) -> int:
        """How many nodes a step of one row feeds to the base, root included."""
        return self.executor.spec.verified_nodes

    def batch_for(self, rows: int) -> int:
        """The smallest batch that holds so many rows."""
        return next(batch for batch in self.batches if batch >= rows)

    def places_for(self, tokens: int) -> int:
        """The smallest cache for texts of so many tokens, those fed in a step included."""
        return next(places for places in self.places if places >= tokens)

    def nbytes(self, rows: int, tokens: int) -> int:
        """What a batch of so many rows takes while its longest text has so many tokens."""
        return self.shapes.nbytes(self.batch_for(rows), self.places_for(tokens + self.spare))

    def nbytes_to_read(self, length: int) -> int:
        """At most what a prompt of so many tokens takes while it is read."""
        return self.shapes.nbytes(1, self.places_for(length + max(self.spare, self.chunk)))

    # --- reading a prompt -------------------------------------------------------------------------------------

    def places_to_read(self, start: int, length: int) -> int:
        """The cache in which a prompt is read from token ``start`` on: its last piece is padded."""
        last = (length - start - 1) % self.chunk + 1
        return self.places_for(max(length + self.spare, length - last + self._width_for(last)))

    def _width_for(self, tokens: int) -> int:
        return next(width for width in self.widths if width >= tokens)

    def empty_row(self, places: int) -> State:
        return self._reads.empty(1, places, self._nothing)

    def rewound(self, state: State, length: int, ids: np.ndarray) -> State:
        """Cut a state of one row to its first ``length`` tokens; they are those of ``ids``. ``state`` is donated."""
        counts = self._counted(ids[:length]) if self.sizes.penalties else None
        return self._reads.rewind(state, np.array([length], np.int32), counts)

    def _counted(self, ids: np.ndarray) -> TokenCounts:
        """A prompt's tokens, as a penalty wants them."""
        prompt = np.zeros((1, self._vocab_size), bool)
        prompt[0, ids] = True
        return TokenCounts(jnp.asarray(prompt), jnp.asarray(np.zeros(prompt.shape, np.int32)))  # which compiles nothing

    def feed(self, state: State, ids: np.ndarray, following: int) -> State:
        """Feed a whole piece of a prompt that goes on with the token ``following``; ``state`` is donated."""
        more, counts = right_padded([ids], self.chunk)
        return self._reads.feed(state, more, counts, np.array([following], np.int32))

    def end(self, state: State, ids: np.ndarray, key, spec: DecodeSpec) -> State:
        """Feed the last piece, after which the row can join others; ``state`` is donated."""
        more, counts = right_padded([ids], self._width_for(len(ids)))
        return self._reads.extend(state, more, counts, self.sampling(spec, key))

    @staticmethod
    @functools.cache
    def _key_program():
        return jax.jit(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number)[None])

    def key(self, seed: int, number: int):
        """Of prompt ``number`` of those with this seed, ``[1]``: the key that it has in `hydrajax.generate`."""
        return self._key_program()(np.uint32(seed), np.int32(number))

    # --- states on the move -----------------------------------------------------------------------------------

    def row_of(self, state: State, at: int, places: int) -> State:
        """A copy of one row in a state of its own, to be `rewound` before it goes on."""
        return self.shapes.moved(state, [at], places)

    def copies(self, row: State, batch: int, places: int) -> State:
        """A batch of copies of one row."""
        return self._reads.stay(self.shapes.moved(row, [0] * batch, places))

    def put(self, state: State, at: int, row: State, places: int) -> State:
        """``state``, which has so many ``places`` and is donated, with its row ``at`` replaced by a copy of ``row``."""
        return put_row(state, at, self._reads.stay(self.shapes.moved(row, [0], places)))

    def reshaped(self, state: State, rows: Sequence[int], places: int) -> State:
        """The given rows of ``state``, which is deleted, in a batch of so many places."""
        return self._reads.stay(self.shapes.reshaped(state, rows, places))

    # --- ahead of time ----------------------------------------------------------------------------------------

    def warm(self, on_status: Callable[[str], None] = lambda text: None) -> None:
        """Compile everything, by running it on nothing: no request waits for a program then.

        For p sizes of caches, b of batches and w of last pieces these are at most p * (w + 2) programs that read, p * b
        that decode, as many that decode without the draft, and p * (b + 1) that rewind; and of those that move one
        array (`hydrajax.serve.shapes`), for every kind of array, p * b that put a row in, as many that take one out and
        that copy one, p * (p - 1) that fit one.
        """
        piece = np.zeros(self.chunk, np.int32)
        total = len(self.places) * (len(self.widths) + len(self.batches) + 2)
        done = 0

        def say():
            nonlocal done
            on_status(f"compiling {done} of {total}")
            done += 1

        for places in self.places:
            row = self.rewound(self.empty_row(places), 0, piece)
            if places > self.chunk:
                say()
                row = self.rewound(self.feed(row, piece, 0), 0, piece)
            for width in self.widths:
                if width <= places:
                    say()
                    row = self.rewound(self.end(row, piece[:width], self.key(0, 0), self.spec), 0, piece)
            say()
            for wanted in self.places:
                self.row_of(row, 0, wanted)
            for batch in self.batches:
                say()
                state = self.copies(row, batch, places)
                for executor in filter(None, (self._drafting[batch], self._plain)):
                    state, _ = executor.advance(state, np.ones(batch, bool), 1)
                self.row_of(self.put(state, 0, row, places), batch - 1, places)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    """The first number, so many times it, and so on, and the last; but none that would nearly be the last."""
    found = [first]
    while found[-1] < last:
        following = factor * found[-1]
        found.append(following if 1.5 * following <= last else last)
    return tuple(found)
