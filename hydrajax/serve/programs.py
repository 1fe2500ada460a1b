"""The compiled programs that a batcher runs, and the few shapes that they come in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from hydrajax.bundle import Bundle
from hydrajax.decoding.decode import make_engine
from hydrajax.decoding.either import GreedyOrExact
from hydrajax.decoding.loop import Bursts
from hydrajax.decoding.prompts import SMALLEST_BUCKET, bucket, right_padded
from hydrajax.decoding.sampling import per_row
from hydrajax.decoding.state import DecodeState
from hydrajax.errors import HydrajaxError
from hydrajax.serve.rows import Shapes, put_row
from hydrajax.ssd.decode import are_apart
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree


@dataclass(frozen=True)
class Sizes:
    """What a batcher may use.

    rows: most requests that run at once. chunk: tokens of a prompt that are read between two steps. places: of the
    smallest cache; larger ones have twice as many, and again. penalties: whether requests may have some. top_logprobs:
    of how many of the base's likeliest tokens a row keeps the log-probabilities, at every place of its output.
    """

    rows: int = 8
    chunk: int = 256
    places: int = 256
    penalties: bool = False
    top_logprobs: int = 0


class Programs:
    """Of one model; each is compiled when it is first used.

    tree_for: the tree for so many rows. drops_draft: whether there are also programs for steps without a draft. Raises
    `HydrajaxError` for a tree that the drafter cannot fill, and for sizes that make no sense.
    """

    def __init__(
        self,
        loaded: Bundle,
        sizes: Sizes,
        tree_for: Callable[[int], CandidateTree] | None = None,
        *,
        drops_draft: bool = False,
    ):
        for name in ("rows", "chunk", "places"):
            if getattr(sizes, name) < 1:
                raise HydrajaxError(f"{name}: must be at least 1, found {getattr(sizes, name)}")
        if are_apart(loaded.params):
            raise HydrajaxError("draft_devices: requests that share a batch need base and draft on the same devices")
        self.loaded, self.sizes = loaded, sizes
        config = loaded.model.config
        self.context = config.max_positions
        self.chunk = bucket(min(sizes.chunk, self.context), self.context)
        rule = GreedyOrExact.in_full(config.vocab_size, penalties=sizes.penalties)
        settings = {"max_new_tokens": self.context, "eos_ids": loaded.eos_ids, "logprobs": True}
        settings["top_logprobs"] = sizes.top_logprobs
        self.batches = _growing(1, sizes.rows, 2)
        self.widths = _growing(min(SMALLEST_BUCKET, self.chunk), self.chunk, 4)  # of a prompt's last piece
        trees = {batch: (tree_for or loaded.default_tree)(batch) for batch in self.batches}
        plain = [presets.root()] if drops_draft else []
        bursts = {
            tree: Bursts(make_engine(loaded.model, loaded.drafter, tree, rule, **settings))
            for tree in dict.fromkeys([*trees.values(), *plain])
        }
        self.bursts = {batch: bursts[tree] for batch, tree in trees.items()}
        # The drafter goes on reading what is emitted, so that it can be asked again.
        self.plain = bursts[presets.root()] if drops_draft and len(bursts) > 1 else None
        # Prompts are read into states that have room for the paths of every tree.
        self._reads = max(bursts.values(), key=lambda some: some.engine.tree.depth)
        engine = self._reads.engine
        self.shapes = Shapes(engine, rule)
        self.longest_path = engine.depth + 1
        self.spare = max(loaded.drafter.spec.verified_nodes(tree) for tree in bursts)
        most = self.context + max(self.spare, self.chunk)
        self.places = _growing(min(sizes.places, most), most, 2)
        self._empty = jax.jit(lambda slots: engine.empty(1, slots, rule), static_argnums=0)
        self._feed = jax.jit(engine.feed, donate_argnums=1)
        self._rewind = jax.jit(engine.rewind, donate_argnums=0)
        # What a drafter holds may depend on the number of places (`Drafter.rewind`).
        self._stay = jax.jit(lambda state: engine.rewind(state, state.target.cache.lengths), donate_argnums=0)

    @property
    def nodes(self) -> int:
        """That a step of one row feeds, the root counted."""
        return self.loaded.drafter.spec.verified_nodes(self.bursts[1].engine.tree)

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

    def empty_row(self, places: int) -> DecodeState:
        return self._empty(places)

    def rewound(self, state: DecodeState, length: int) -> DecodeState:
        """``state`` is donated."""
        return self._rewind(state, np.array([length], np.int32))

    def feed(self, state: DecodeState, ids: np.ndarray, following: int) -> DecodeState:
        """A whole piece of a prompt that goes on with the token ``following``; ``state`` is donated."""
        more, counts = right_padded([ids], self.chunk)
        return self._feed(self.loaded.params, state, more, counts, np.array([following], np.int32))

    def end(self, state: DecodeState, ids: np.ndarray, key, rule: GreedyOrExact, limit: int) -> DecodeState:
        """The last piece, after which the row can join others; ``state`` is donated."""
        more, counts = right_padded([ids], self._width_for(len(ids)))
        limits = np.array([limit], np.int32)
        return self._reads.extend(self.loaded.params, state, more, counts, key, per_row([rule], 1), limits)

    @staticmethod
    @functools.cache
    def _key_program():
        return jax.jit(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number)[None])

    def key(self, seed: int, number: int):
        """Of prompt ``number`` of those with this seed, ``[1]``: the key that it has in `hydrajax.generate`."""
        return self._key_program()(np.uint32(seed), np.int32(number))

    # --- states on the move -----------------------------------------------------------------------------------

    def row_of(self, state: DecodeState, at: int, places: int) -> DecodeState:
        """A copy of one row in a state of its own, to be `rewound` before it goes on."""
        return self.shapes.moved(state, [at], places)

    def copies(self, row: DecodeState, batch: int, places: int) -> DecodeState:
        """A batch of copies of one row."""
        return self._stay(self.shapes.moved(row, [0] * batch, places))

    def put(self, state: DecodeState, at: int, row: DecodeState, places: int) -> DecodeState:
        """``state``, which has so many ``places`` and is donated, with its row ``at`` replaced by a copy of ``row``."""
        return put_row(state, at, self._stay(self.shapes.moved(row, [0], places)))

    def reshaped(self, state: DecodeState, rows: Sequence[int], places: int) -> DecodeState:
        """The given rows of ``state``, which is deleted, in a batch of so many places."""
        return self._stay(self.shapes.reshaped(state, rows, places))

    # --- ahead of time ----------------------------------------------------------------------------------------

    def warm(self, on_status: Callable[[str], None] = lambda text: None) -> None:
        """Compile everything, by running it on nothing: no request waits for a program then.

        For p sizes of caches, b of batches and w of last pieces these are at most p * (w + 2) programs that read, p * b
        that decode, as many that decode without the draft, and p * (b + 1) that rewind; and of those that move one
        array (`hydrajax.serve.rows`), for every kind of array, p * b that put a row in, as many that take one out and
        that copy one, p * (p - 1) that fit one.
        """
        rule = GreedyOrExact.in_full(self.loaded.model.config.vocab_size, penalties=self.sizes.penalties)
        piece = np.zeros(self.chunk, np.int32)
        total = len(self.places) * (len(self.widths) + len(self.batches) + 2)
        done = 0

        def say():
            nonlocal done
            on_status(f"compiling {done} of {total}")
            done += 1

        for places in self.places:
            row = self.rewound(self.empty_row(places), 0)
            if places > self.chunk:
                say()
                row = self.rewound(self.feed(row, piece, 0), 0)
            for width in self.widths:
                if width <= places:
                    say()
                    row = self.rewound(self.end(row, piece[:width], self.key(0, 0), rule, 1), 0)
            say()
            for wanted in self.places:
                self.row_of(row, 0, wanted)
            for batch in self.batches:
                say()
                state = self.copies(row, batch, places)
                for bursts in filter(None, (self.bursts[batch], self.plain)):
                    state, _ = bursts.advance(self.loaded.params, state, np.ones(batch, bool), 1)
                self.row_of(self.put(state, 0, row, places), batch - 1, places)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    """The first number, so many times it, and so on, and the last; but none that would nearly be the last."""
    found = [first]
    while found[-1] < last:
        following = factor * found[-1]
        found.append(following if 1.5 * following <= last else last)
    return tuple(found)
