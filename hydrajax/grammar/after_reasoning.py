"""Grammars that begin after a mark: the reasoning before it is free, and the text after it follows the grammar."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from hydrajax.decoding.constraints import ALL, WORD, Constraint, GrammarLike
from hydrajax.errors import HydrajaxError

FREE = -1  # in no tree of the inner constraint: before the end mark


@dataclass(frozen=True)
class AfterMark:
    """A `hydrajax.decoding.constraints.GrammarLike` that applies to the tokens after the first end mark.

    Attributes:
        grammar: The texts after the mark.
        end: The mark that ends the reasoning: the name of one token of the vocabulary, or its id.
        begin: The mark that begins a reasoning. If given, a text has a reasoning only if this is its first token;
            otherwise the grammar applies from the start. None: the text begins within the reasoning.
    """

    grammar: GrammarLike
    end: str | int
    begin: str | int | None = None

    @property
    def text(self) -> str:
        return getattr(self.grammar, "text", "")

    def start(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Constraint:
        """Return the constraint of an empty text.

        Raises:
            HydrajaxError: If a mark is not one token, and as the grammar's ``start``.
        """
        begin, end = (mark if mark is None else _id_of(mark, tokenizer) for mark in (self.begin, self.end))
        return AfterToken(self.grammar.start(tokenizer, vocab_size, eos_ids), end, begin)


class AfterToken:
    """A `hydrajax.decoding.constraints.Constraint` in which another one begins after a token."""

    def __init__(self, inner: Constraint, end: int, begin: int | None = None):
        """Wrap the constraint ``inner`` of an empty text; ``end`` and ``begin`` are the ids of `AfterMark`."""
        self._inner, self._end, self._begin = inner, end, begin
        self._first: int | None = None  # tokens before the inner constraint's, once that has begun
        self._empty = True  # the text

    @property
    def error(self) -> str | None:
        return None if self._first is None else self._inner.error  # of no branch that was not taken

    def copy(self) -> AfterToken:
        found = copy.copy(self)
        found._inner = self._inner.copy()
        return found

    def follow(self, text: Sequence[int]) -> None:
        self._empty = not text
        if self._first is None and text:
            if self._begin not in (None, text[0]):
                self._first = 0
            elif self._end in text:
                self._first = list(text).index(self._end) + 1
        if self._first is not None and len(text) > self._first:
            self._inner.follow(text[self._first :])

    def forced(self, most: int) -> list[int]:
        return [] if self._first is None else self._inner.forced(most)

    def allow(
        self, tokens: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"], allowed: UInt32[np.ndarray, "N W"]
    ) -> None:
        if self._first is not None:
            self._inner.allow(tokens, parents, allowed)
            return
        optional, allowed[:] = self._empty and self._begin is not None, ALL
        roots = [0 if optional else FREE]  # of the inner constraint's tree that each node is in; several may end
        for node, (token, parent) in enumerate(zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True), start=1):
            root = roots[parent] if parent >= 0 else FREE
            if optional and parent == 0 and token == self._begin:
                root = FREE
            elif root == FREE and parent >= 0 and token == self._end:
                root = node
            roots.append(root)
        for root in set(roots) - {FREE}:
            self._allow_below([node for node, own in enumerate(roots) if own == root], tokens, parents, allowed)
        if optional:
            allowed[0, self._begin // WORD] |= np.uint32(1 << self._begin % WORD)

    def _allow_below(self, nodes: list[int], tokens, parents, allowed) -> None:
        """Write the inner constraint's masks of a tree, whose root is the first node and ends the empty text."""
        number = {node: index for index, node in enumerate(nodes)}
        below = [number.get(int(parents[node]), -1) for node in nodes]
        found = np.zeros((len(nodes), allowed.shape[1]), np.uint32)
        self._inner.allow(tokens[nodes], np.array(below, np.int32), found)
        allowed[nodes] = found


def _id_of(mark: str | int, tokenizer: Any) -> int:
    if isinstance(mark, int):
        return mark
    if tokenizer is None:
        raise HydrajaxError("grammar: requires a tokenizer, which the base does not have")
    if (found := single_token(mark, tokenizer)) is None:
        raise HydrajaxError(f"grammar: begins after {mark!r}, which is several tokens of the base, expected one token")
    return found


def single_token(mark: str, tokenizer: Any) -> int | None:
    """Return the id of the token that the tokenizer writes a mark with, None for several tokens."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and tokenizer.convert_ids_to_tokens(ids[0]) == mark else None
