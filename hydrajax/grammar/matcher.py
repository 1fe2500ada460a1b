"""One sequence's place in a grammar: which tokens may follow it, at every node of a candidate tree."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from hydrajax.decoding.constraints import WORD, allowed_next
from hydrajax.errors import one_line
from hydrajax.grammar.trial import STACK

# Limits of the work for one mask, of a grammar's symbols and of its lexer's states. A sequence whose grammar needs more
# ends with an error. Compiling takes time that grows with the square of the symbols, of which 3,000 optional properties
# have 30,000.
LIMITS = {"step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_grammar_size": 50_000, "max_lexer_states": 50_000}

# One thread compiles: each would keep memory of its own.
_compiler = ThreadPoolExecutor(1, "grammar")


def on_deep_stack(compiled: Callable[[], Any]) -> Any:
    """Return the result of a call of llguidance's compiler, made on a thread with a stack of `STACK` bytes."""
    usual = threading.stack_size(STACK)
    try:
        found = _compiler.submit(compiled)  # starts the thread
    finally:
        threading.stack_size(usual)
    return found.result()


def can_begin(source: str, text: str) -> bool:
    """Return whether a text of the grammar can begin with ``text``, however it is tokenized.

    Args:
        source: a valid grammar in llguidance's own form.
    """
    import llguidance

    byte, given = llguidance.LLTokenizer("byte"), list(text.encode())
    limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
    matcher = on_deep_stack(lambda: llguidance.LLMatcher(byte, source, log_level=0, limits=limits))
    return matcher.try_consume_tokens(given) == len(given)


class Matcher:
    """A `hydrajax.decoding.constraints.Constraint` on llguidance's parser.

    Where the grammar leaves one text, llguidance allows only the tokens by which the tokenizer writes it. Elsewhere it
    allows every token that can begin an allowed text. EOS is allowed after a complete and valid text.
    """

    def __init__(self, vocabulary: Any, source: str, is_valid: Callable[[Sequence[int]], bool] | None = None):
        """Compile a grammar.

        Args:
            vocabulary: of `hydrajax.grammar.vocabulary.vocabulary_of`.
            source: the grammar in llguidance's own form.
            is_valid: judges the tokens of a text that llguidance regards as complete.
        """
        self._vocabulary, self._source, self._is_valid = vocabulary, source, is_valid
        self._text: list[int] = []
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # after paths below the text
        self.error: str | None = None
        self._compile()
        allowed_next(self, vocabulary.vocab_size)  # without any token there is an error

    def copy(self) -> Matcher:
        found = copy.copy(self)
        found._matcher, found._masks = self._matcher.deep_copy(), {}
        return found

    def follow(self, text: Sequence[int]) -> None:
        new, self._text = list(text[len(self._text) :]), list(text)
        self._masks.clear()
        if not (self._ended or self.error or self._matcher.consume_tokens(new)):
            self._compile_again()

    def forced(self, most: int) -> list[int]:
        found = self._matcher.compute_ff_tokens()[:most]
        read = self._matcher.try_consume_tokens(found)
        ends = read == len(found) < most and self._matcher.is_stopped() and not self._matcher.is_error()
        self._matcher.rollback(read)
        return [*found, self._vocabulary.eos_token] if ends else found

    def allow(
        self, tokens: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"], allowed: UInt32[np.ndarray, "N W"]
    ) -> None:
        if self._ended:  # nothing follows
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0 and tokens[node] >= 0:
                children.setdefault(parent, []).append(node)
        allowed[:] = 0
        if self._matcher.is_error() and not self.error:  # copies share a lexer, and another one has exhausted it
            self._compile_again()
        if not self.error:
            self._visit(0, [], tokens, children, allowed)
        if not allowed[0].any():
            self._fail()

    # No nested function: a cycle of references would keep the parser until a late garbage collection.
    def _visit(self, node: int, path: list[int], tokens, children: dict[int, list[int]], allowed) -> None:
        mask, known = allowed[node], self._masks.get(tuple(path))
        if known is not None:
            mask[:] = known
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                mask[:] = 0
                return
            self._check_end(mask, path)
            self._masks[tuple(path)] = mask.copy()
        for child in children.get(node, ()):
            token = int(tokens[child])
            if not mask[token // WORD] >> np.uint32(token % WORD) & 1 or token in self._vocabulary.eos_tokens:
                continue  # never accepted, or the last token of a text
            if self._matcher.consume_token(token):
                self._visit(child, [*path, token], tokens, children, allowed)
            if self._matcher.is_error():  # for ever, but only of this branch
                self._compile_again(path)
            else:
                self._matcher.rollback(1)

    def _check_end(self, mask: UInt32[np.ndarray, " W"], path: list[int]) -> None:
        """Forbid EOS where llguidance only finds no continuation, and after a text that is not valid."""
        ends = [token for token in self._vocabulary.eos_tokens if mask[token // WORD] >> np.uint32(token % WORD) & 1]
        check = self._is_valid or (lambda ids: True)
        if ends and not (self._matcher.is_accepting() and check([*self._text, *path])):
            for token in ends:
                mask[token // WORD] &= ~np.uint32(1 << token % WORD)

    @property
    def _ended(self) -> bool:
        """The text ends with EOS, which the parser does not read."""
        return bool(self._text) and self._text[-1] in self._vocabulary.eos_tokens

    def _compile(self) -> None:
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        self._matcher = on_deep_stack(
            lambda: llguidance.LLMatcher(self._vocabulary, self._source, log_level=0, limits=limits)
        )

    def _compile_again(self, path: Sequence[int] = ()) -> None:
        """Leave the parser's state of error, which is permanent, and read the text and a path again."""
        self._compile()
        if not self._matcher.consume_tokens([*self._text, *path]):
            self._fail()

    def _fail(self) -> None:
        found = self._matcher.get_error().replace("<non-verbose/>", "") if self._matcher.is_error() else ""
        if not found or found.startswith(("NoExtension", "Parser Error: token")):
            found = "no token of the vocabulary can continue or end the text" if self._text else "no text satisfies it"
        self.error = self.error or one_line(found, 200)
