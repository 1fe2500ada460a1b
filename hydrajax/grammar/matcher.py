"""One sequence's place in a grammar: which tokens may follow it, at every node of a candidate tree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from hydrajax.decoding.constraints import WORD, words
from hydrajax.errors import HydrajaxError, one_line

# Bounds of the work for one mask, about 15 and 3 ms; a grammar that needs more ends its sequence with an error.
LIMITS = {"step_lexer_fuel": 200_000, "step_max_items": 50_000}


@functools.lru_cache(maxsize=64)  # complex schemas take a tenth of a second
def compiled(vocabulary: Any, kind: str, source: str) -> Matcher:
    """Return the matcher of an empty text. Copy it before use.

    Args:
        vocabulary: of `hydrajax.grammar.vocabulary.vocabulary_of`.
        kind: names the grammar in messages.
        source: the grammar in llguidance's own form.

    Raises:
        HydrajaxError: for a grammar that llguidance refuses, and for one that no text satisfies.
    """
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
    found = Matcher(llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits), vocabulary)
    found.allow(np.array([-1]), np.array([-1]), np.zeros((1, words(vocabulary.vocab_size)), np.uint32))
    if found.error:
        raise HydrajaxError(f"{kind}: {found.error}")
    return found


class Matcher:
    """A `hydrajax.decoding.constraints.Constraint` on llguidance's parser.

    Where the grammar leaves one text, llguidance allows only the tokens by which the tokenizer writes it. Elsewhere it
    allows every token that can begin an allowed text. After a complete text that nothing can follow, EOS is allowed.
    """

    def __init__(self, empty: Any, vocabulary: Any, text: Sequence[int] = ()):
        """Build the matcher of a text.

        Args:
            empty: an `llguidance.LLMatcher` that has read nothing; it is copied.
            vocabulary: its `llguidance.LLTokenizer`.
            text: token ids.
        """
        self._empty, self._vocabulary, self._text = empty, vocabulary, list(text)
        self.error: str | None = None
        self._read(self._text)

    def copy(self) -> Matcher:
        return Matcher(self._empty, self._vocabulary, self._text)

    def follow(self, text: Sequence[int]) -> None:
        new, self._text = list(text[len(self._text) :]), list(text)
        if not self._ended and self.error is None and not self._matcher.consume_tokens(new):
            self._fail()

    @property
    def _ended(self) -> bool:
        """The text ends with EOS, which the parser does not read."""
        return bool(self._text) and self._text[-1] in self._vocabulary.eos_tokens

    def forced(self, most: int) -> list[int]:
        found = self._matcher.compute_ff_tokens()[:most]
        read = self._matcher.try_consume_tokens(found)
        ends = read == len(found) < most and self._matcher.is_stopped() and not self._matcher.is_error()
        self._matcher.rollback(read)
        return [*found, self._vocabulary.eos_token] if ends else found

    def allow(
        self, tokens: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"], allowed: UInt32[np.ndarray, "N W"]
    ) -> None:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0 and tokens[node] >= 0:
                children.setdefault(parent, []).append(node)
        if self._ended:  # nothing follows
            return
        allowed[:] = 0

        def visit(node: int, path: list[int]) -> None:
            mask = allowed[node]
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                mask[:] = 0
                return
            for child in children.get(node, ()):
                token = int(tokens[child])
                if not mask[token // WORD] >> np.uint32(token % WORD) & 1 or token in self._vocabulary.eos_tokens:
                    continue  # never accepted, or the last token of a text
                if self._matcher.consume_token(token):
                    visit(child, [*path, token])
                if self._matcher.is_error():  # for ever, but only of this branch
                    self._read([*self._text, *path])
                else:
                    self._matcher.rollback(1)

        if self.error is None:
            visit(0, [])
        if not allowed[0].any():
            self._fail()

    def _read(self, text: list[int]) -> None:
        self._matcher = self._empty.deep_copy()
        if not self._ended and not self._matcher.consume_tokens(text):
            self._fail()

    def _fail(self) -> None:
        found = self._matcher.get_error() if self._matcher.is_error() else ""
        self.error = self.error or one_line(found or "no token of the vocabulary can continue the text", 200)
