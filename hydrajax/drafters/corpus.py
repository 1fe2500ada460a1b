"""Past outputs of this process in an index that a decode step searches: suffix decoding (arXiv 2411.04975).

Agents, retries and edits ask for nearly the same text again and again. `Corpus` keeps the last tokens of earlier
outputs, bounded in memory. Every place in them is sorted by the tokens before it, read backwards, so that the places
with the longest context in common with the end of a text are neighbours, and a binary search on the device finds them
(a suffix array; the paper uses a suffix tree). The host updates the index between calls of a program. Shapes never
change, so nothing is compiled again.

A corpus never changes a text: its tokens are drafts, which the base verifies. But a text that was seen before takes
fewer steps, so the time of an answer can show that somebody asked for it before. Share a corpus only among users who
may know this.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array

TOKENS, MOST_TOKENS = 65536, 2**24  # of a corpus; a token takes 8 bytes on the device and on the host
CONTEXT = 32  # tokens before a place that are compared
END, NOTHING = -1, -2  # between texts; before the beginning of a query. Neither equals a token


class Index(NamedTuple):
    """The arrays of a corpus of C tokens that a program reads, all int32.

    Attributes:
        tokens: ``[C]`` a ring of texts, `END` after each.
        order: ``[C]`` places in ``tokens``, sorted by the `CONTEXT` tokens before them, backwards; of equal ones the
            latest first.
        count: ``[1]`` how many entries of ``order`` are valid.
        head: ``[1]`` the place in ``tokens`` that is written next. Programs do not read it; copies of a corpus do.
    """

    tokens: Int[Array, " C"]
    order: Int[Array, " C"]
    count: Int[Array, " 1"]
    head: Int[Array, " 1"]


class Corpus:
    """The last tokens of past outputs. A pytree node: to a program it is its `Index` at the time of the call.

    It can be shared by any number of models with one tokenizer, and by threads. Copies, also those of `jax.tree.map`
    and pickle, keep its texts and remember later ones by themselves.

    Example:
        ```python
        m = hydrajax.load("shipped", "corpus+hydra++")
        m.generate(["def area(", "def area(w"], max_new_tokens=64)  # the second text is drafted from the first
        m.corpus.remember(m.prompt_ids("def volume(a, b, c):\\n    return a * b * c", "text"))
        m.corpus.clear()
        ```
    """

    def __init__(self, tokens: int = TOKENS, place: Callable[[Any], Any] = jax.device_put):
        """Make an empty corpus.

        Args:
            tokens: C, the number of tokens that it keeps, ends of texts and a few tokens of context included.
            place: Puts arrays onto the devices that decode.

        Raises:
            HydrajaxError: For a number out of range.
        """
        if not 2 * CONTEXT < tokens <= MOST_TOKENS:
            raise HydrajaxError(f"corpus: got {tokens} tokens, expected {2 * CONTEXT + 1} to {MOST_TOKENS}")
        self._place, self._lock = place, threading.Lock()
        self._ring: Int[np.ndarray, " C"] = np.full(tokens, END, np.int32)
        self._order, self._head = np.empty(0, np.int32), 0
        self._index: Index | None = None

    def __len__(self) -> int:
        """Return the number of places that a text can be continued from."""
        self._read_index()
        return len(self._order)

    def __reduce__(self) -> tuple:
        return _unflatten, (None, tuple(self.index))

    @property
    def capacity(self) -> int:
        """C."""
        return len(self.index.tokens if self._ring is None else self._ring)

    def _read_index(self) -> None:
        """Take a copy's texts from its index, which is all that `jax.tree.map` gives it."""
        with self._lock:
            if self._ring is None and self._index:
                ring, order, count, head = jax.device_get(self._index)
                self._place = functools.partial(jax.device_put, device=getattr(self._index.tokens, "sharding", None))
                self._ring, self._order, self._head = ring.copy(), order[: count[0]], int(head[0])

    def clear(self) -> None:
        """Forget all texts."""
        self._read_index()
        with self._lock:
            self._ring[:], self._head = END, 0
            self._order, self._index = np.empty(0, np.int32), None

    def remember(self, ids: Sequence[int] | np.ndarray, prompt: Sequence[int] | np.ndarray = ()) -> None:
        """Add a text. The oldest ones make room; of a text that is too long, the end is kept.

        Args:
            prompt: Token ids before the text. The last `CONTEXT` of them let later texts continue with the first of
                ``ids``; they are not drafted themselves.
        """
        text = np.asarray(ids, np.int32).reshape(-1)[-(self.capacity - 2 * CONTEXT - 1) :]
        if not text.size:
            return
        before = np.asarray(prompt, np.int32).reshape(-1)[-CONTEXT:] if len(text) == np.size(ids) else text[:0]
        written = np.concatenate([before, text, np.array([END], np.int32)])
        self._read_index()
        with self._lock:
            places = (self._head + np.arange(len(written) + CONTEXT)) % self.capacity
            # Places whose context is overwritten leave the index.
            stale = np.zeros(self.capacity, bool)
            stale[places] = True
            order = self._order[~stale[self._order]]
            self._ring[places[: len(written)]] = written
            self._head = (self._head + len(written)) % self.capacity
            new = places[len(before) : len(written) - 1][::-1]  # latest first
            contexts = self._contexts(new)
            new = new[np.lexsort(contexts.T[::-1])]  # stable
            self._order = np.insert(order, self._places_in(order, self._contexts(new)), new)
            self._index = None

    def _contexts(self, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n context"]:
        return self._ring[(places[:, None] - 1 - np.arange(CONTEXT)) % self.capacity]

    def _places_in(self, order: Int[np.ndarray, " m"], contexts: Int[np.ndarray, "n context"]) -> np.ndarray:
        """Return where to insert these contexts before all that are not less."""
        low, high = np.zeros(len(contexts), np.int64), np.full(len(contexts), len(order))
        while (low < high).any():
            middle = (low + high) // 2
            there = self._contexts(order[np.minimum(middle, len(order) - 1)])
            first = np.argmax(there != contexts, axis=1)
            rows = np.arange(len(contexts))
            less = (there[rows, first] < contexts[rows, first]) & (low < high)
            low, high = np.where(less, middle + 1, low), np.where(less, high, np.minimum(middle, high))
        return low

    @property
    def index(self) -> Index:
        """The arrays on the device."""
        with self._lock:
            if self._index is None:
                order = np.zeros(self.capacity, np.int32)
                order[: len(self._order)] = self._order
                count, head = np.array([[len(self._order)], [self._head]], np.int32)
                self._index = Index(*map(self._place, (self._ring.copy(), order, count, head)))
            return self._index


def _unflatten(_, arrays) -> Corpus:
    """Return a corpus that is its index alone, such as one inside a program."""
    found = object.__new__(Corpus)
    vars(found).update(_lock=threading.Lock(), _ring=None, _index=Index(*arrays))
    return found


# Registered as a node, so that every call reads the index of that moment, also through copies of the parameters.
jax.tree_util.register_pytree_node(Corpus, lambda corpus: (tuple(corpus.index), None), _unflatten)
