"""Grammars in pure Python: the tokens that may follow a text are a function of its tokens."""

import functools
from dataclasses import dataclass

import numpy as np

OPEN, CLOSE, END = 0, 1, 2


class HostGrammar:
    """Base class of a `hydrajax.decoding.constraints.GrammarLike`; subclasses are frozen dataclasses."""

    def start(self, tokenizer, vocab_size, eos_ids) -> "Place":
        return Place(self, vocab_size)

    def after(self, text: tuple[int, ...]) -> frozenset[int]:
        """Return the tokens that may follow a text."""
        raise NotImplementedError

    def error(self, text: tuple[int, ...]) -> str | None:
        return None

    def forced(self, text: tuple[int, ...], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(allowed := self.after((*text, *found))) == 1:
            found += allowed
        return found


class Place:
    """A `hydrajax.decoding.constraints.Constraint`: a grammar and a text."""

    def __init__(self, grammar: HostGrammar, vocab_size: int, text: tuple[int, ...] = ()):
        self.grammar, self.vocab_size, self.text = grammar, vocab_size, text
        self.error = grammar.error(text)

    def copy(self):
        return type(self)(self.grammar, self.vocab_size, self.text)

    def follow(self, text):
        assert self.error is None
        assert tuple(text[: len(self.text)]) == self.text  # emitted tokens do not change
        self.text = tuple(text)
        self.error = self.grammar.error(self.text)

    def forced(self, most):
        return self.grammar.forced(self.text, most)

    def allow(self, tokens, parents, allowed):
        texts = [self.text]  # at each node
        for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            if node:  # a node without a parent is never accepted
                texts.append((*texts[parent], token) if parent >= 0 else self.text)
            allowed[node] = mask_after(self.grammar, texts[node], self.vocab_size)


class Misplaced(Place):
    """Wrong: every node gets the mask of the node before it."""

    def allow(self, tokens, parents, allowed):
        super().allow(tokens, parents, allowed)
        allowed[1:] = allowed[:-1].copy()


@functools.lru_cache(maxsize=100_000)
def mask_after(grammar: HostGrammar, text: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Return uint32 ``[W]`` with bit t % 32 of word t // 32 set for each token t that may follow the text."""
    found = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in grammar.after(text):
        found[token // 32] |= np.uint32(1 << token % 32)
    return found


@dataclass(frozen=True)
class Brackets(HostGrammar):
    """Brackets that nest at most ``deepest`` deep; `END` needs all of them closed and ``least`` tokens before it.

    An opening bracket is forced where none is open and the text is short, a closing one at the greatest depth.
    """

    deepest: int = 2
    least: int = 6

    def after(self, text):
        depth = text.count(OPEN) - text.count(CLOSE)
        may = {OPEN: depth < self.deepest, CLOSE: depth > 0, END: depth == 0 and len(text) >= self.least}
        return frozenset(token for token, allowed in may.items() if allowed)


@dataclass(frozen=True)
class Table(HostGrammar):
    """An automaton of random transitions. A state allows one token, which is forced, or ``most``; never `END`."""

    seed: int
    vocab_size: int
    states: int = 9
    most: int = 3

    def after(self, text):
        state = 0
        for token in text:
            state = (5 * state + token + 1) % self.states
        return self._allowed(state)

    @functools.cache  # noqa: B019 - a few grammars per process
    def _allowed(self, state: int) -> frozenset[int]:
        random = np.random.default_rng([self.seed, state])
        count = 1 if state % 3 == 1 else self.most
        return frozenset((random.permutation(self.vocab_size - END - 1)[:count] + END + 1).tolist())


@dataclass(frozen=True)
class Changed(HostGrammar):
    """Another grammar with a defect.

    Attributes:
        inner: The grammar.
        fails_after: An error is reported when the text has this many tokens.
        misplaced: The masks are those of the nodes before (`Misplaced`).
        forces: Claim that these tokens are forced after every text.
    """

    inner: HostGrammar
    fails_after: int | None = None
    misplaced: bool = False
    forces: tuple[int, ...] | None = None

    def start(self, tokenizer, vocab_size, eos_ids):
        return (Misplaced if self.misplaced else Place)(self, vocab_size)

    def after(self, text):
        return self.inner.after(text)

    def error(self, text):
        return "too long" if self.fails_after is not None and len(text) >= self.fails_after else None

    def forced(self, text, most):
        return self.inner.forced(text, most) if self.forces is None else list(self.forces[:most])


@dataclass(frozen=True)
class Reasoned(HostGrammar):
    """Another grammar after free text that ends with a mark, for `hydrajax.grammar.after_reasoning`: token by token.

    begin: The free text must begin with this token, or the grammar applies from the start; None: there is free text.
    """

    inner: HostGrammar
    vocab_size: int
    end: int
    begin: int | None = None

    def after(self, text):
        if self.begin is not None and text[:1] != (self.begin,):
            return self.inner.after(text) | (frozenset() if text else {self.begin})
        found = text.index(self.end) + 1 if self.end in text else None
        return frozenset(range(self.vocab_size)) if found is None else self.inner.after(text[found:])
