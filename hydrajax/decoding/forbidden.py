"""Texts that a sequence must not contain (vLLM's ``bad_words``), and a least length.

A word of one token is a bias. For a word of several, the last token is forbidden where the others precede it in the
output. This depends on the path to a node, so it is a constraint (`hydrajax.decoding.constraints`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydrajax.decoding.constraints import ALL, Constraint, GrammarLike
from hydrajax.decoding.parameters import LARGEST_NUMBER
from hydrajax.decoding.request import Request
from hydrajax.drafters.draft_lm_head import WORD
from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import shown

TokenIds = tuple[int, ...]


def forbidding(
    request: Request, eos_ids: Sequence[int], words: Sequence[TokenIds] = (), min_tokens: int = 0
) -> Request:
    """Return the request without some texts and with a least length.

    Args:
        request: the request.
        eos_ids: the base's.
        words: sequences of tokens that the output must not contain, of `token_sequences`.
        min_tokens: EOS is not among the first ``min_tokens`` tokens.

    Raises:
        HydrajaxError: for wrong values, and for what a grammar or ``stop_token_ids`` contradict.
    """
    for name, value in (("ignore_eos", request.ignore_eos), ("min_tokens", min_tokens)):
        if value and request.grammar is not None:
            raise HydrajaxError(f"{name}: got {shown(value)} with a grammar, which decides where the answer ends")
    if not isinstance(min_tokens, int) or min_tokens < 0:
        raise HydrajaxError(f"min_tokens: got {shown(min_tokens)}, expected an integer from 0 up")
    if min_tokens > request.max_new_tokens:
        limit = request.max_new_tokens
        raise HydrajaxError(f"min_tokens: got {min_tokens}, expected at most the limit of new tokens, {limit}")
    if not isinstance(request.ignore_eos, bool):
        raise HydrajaxError(f"ignore_eos: got {shown(request.ignore_eos)}, expected True or False")
    if min_tokens and request.stop_token_ids:
        raise HydrajaxError(f"min_tokens: got {min_tokens} with stop_token_ids, expected one of them")
    if not (min_tokens or words):
        return request
    from hydrajax.decoding.processors import LogitBias, MinTokens  # like all processors, only if one is used

    if min_tokens and eos_ids:
        request = request.replace(processors=(*request.processors, MinTokens(min_tokens, tuple(eos_ids))))
    if not words:
        return request
    biases = [one for one in request.processors if isinstance(one, LogitBias)] or [LogitBias()]
    others = tuple(one for one in request.processors if not isinstance(one, LogitBias))
    bias = biases[0].with_bias({word[0]: -LARGEST_NUMBER for word in words if len(word) == 1})
    if long := tuple(word for word in words if len(word) > 1):
        request = request.replace(grammar=Forbidden(long, request.grammar))
    return request.replace(processors=(*others, bias) if bias.has_effect else others)


def token_sequences(tokenizer: Any, bad_words: Sequence[str]) -> list[TokenIds]:
    """Return the tokens of words, and with a space before where that changes the first of as many tokens, as vLLM."""
    if tokenizer is None and bad_words:
        raise HydrajaxError("bad_words: requires a tokenizer, which the base does not have")
    if isinstance(bad_words, str) or not all(isinstance(word, str) and word for word in bad_words):
        raise HydrajaxError(f"bad_words: got {shown(bad_words)}, expected a list of texts")
    found: list[TokenIds] = []
    for word in bad_words:
        plain, spaced = (tuple(tokenizer.encode(x, add_special_tokens=False)) for x in (word, f" {word.lstrip()}"))
        if not plain:
            raise HydrajaxError(f"bad_words: got {shown(word)}, expected a text with tokens")
        found += [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
    return found


@dataclass(frozen=True)
class Forbidden:
    """A `GrammarLike` of all texts, or those of another grammar, without some sequences of at least two tokens."""

    words: tuple[TokenIds, ...]
    grammar: GrammarLike | None = None

    def start(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> _Place:
        """Return the constraint of an empty text."""
        return _Place(self.words, None if self.grammar is None else self.grammar.start(tokenizer, vocab_size, eos_ids))


class _Place:
    """A `hydrajax.decoding.constraints.Constraint` at the end of a text."""

    def __init__(self, words: tuple[TokenIds, ...], inner: Constraint | None):
        self._inner, self._text, self._error = inner, (), None
        self._last: dict[TokenIds, list[int]] = {}  # the last tokens of words, by the tokens before
        for *before, last in words:
            self._last.setdefault(tuple(before), []).append(last)
        self._sizes = {len(before) for before in self._last}
        self._most = max(self._sizes)

    @property
    def error(self) -> str | None:
        return self._error or (None if self._inner is None else self._inner.error)

    def copy(self):
        found = copy.copy(self)
        found._inner = None if self._inner is None else self._inner.copy()
        return found

    def follow(self, text):
        self._text = tuple(text[-self._most :])
        if self._inner is not None:
            self._inner.follow(text)

    def forced(self, most):
        return [] if self._inner is None else self._inner.forced(most)

    def allow(self, tokens, parents, allowed):
        if self._inner is None:
            allowed[:] = ALL
        else:
            self._inner.allow(tokens, parents, allowed)
        texts: list[TokenIds] = []  # the ends of the texts at the nodes
        for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            texts.append((*texts[parent], token)[-self._most :] if parent >= 0 else self._text)
            for size in self._sizes:
                for last in self._last.get(texts[node][-size:], ()):
                    allowed[node, last // WORD] &= ~np.uint32(1 << last % WORD)
        if not allowed[0].any():
            self._error = "no token can continue the text without bad_words"
