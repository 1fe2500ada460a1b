"""Answers of an OpenAI-compatible server: whole responses and streams, of completions and chats."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydrajax.text.continuation import INCOMPLETE

# Servers that separate a reasoning text name it differently. It is part of the compared text.
TEXT_FIELDS = ("reasoning_content", "reasoning", "content")


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        logprob: natural log-probability, None if the server gives none.
        top: log-probabilities of the most likely tokens at this position by text.
        start: offset in the answer's text, in characters.
    """

    text: str
    logprob: float | None
    top: dict[str, float]
    start: int = 0


@dataclass(frozen=True)
class Answer:
    """One choice of a response.

    Attributes:
        text: a reasoning text, then the answer.
        finish_reason: as the server names it, None if it is missing.
        tokens: with log-probabilities, None without.
        calls: pairs of name and arguments of the tool calls.
        ended: False for a stream without ``[DONE]``.
    """

    text: str
    finish_reason: str | None = None
    tokens: tuple[Token, ...] | None = None
    calls: tuple[tuple[str, str], ...] = ()
    ended: bool = True
    index: int = 0


class Malformed(ValueError):
    """The response is not in OpenAI's format."""


def whole_answers(response: Any) -> tuple[Answer, ...]:
    """Return the choices of a response, in the order of their index. Raises `Malformed`."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise Malformed("no choices")
    found = [_choice(choice) for choice in choices]
    return tuple(sorted(found, key=lambda answer: answer.index))


def streamed_answers(events: Iterable[Any], ended: bool) -> tuple[Answer, ...]:
    """Return the choices of a stream, given its events and whether ``[DONE]`` followed them. Raises `Malformed`."""
    growing: dict[int, _Growing] = {}
    for event in events:
        if not isinstance(event, dict):
            raise Malformed("an event that is no object")
        if "error" in event:
            raise Malformed(f"an error in the stream: {event['error']}")
        for choice in event.get("choices") or ():
            growing.setdefault(choice.get("index", 0), _Growing()).add(choice)
    if not growing:
        raise Malformed("a stream without choices")
    return tuple(growing[index].answer(index, ended) for index in sorted(growing))


@dataclass
class _Growing:
    """A choice of which a part has arrived."""

    texts: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.texts.append(_text(delta) if "delta" in choice else choice.get("text") or "")
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.tokens += _tokens(choice.get("logprobs")) or ()
        for number, call in enumerate(delta.get("tool_calls") or ()):
            function, parts = call.get("function") or {}, self.calls.setdefault(call.get("index", number), ["", ""])
            parts[0] += function.get("name") or ""
            parts[1] += function.get("arguments") or ""

    def answer(self, index: int, ended: bool) -> Answer:
        calls = tuple((name, arguments) for _, (name, arguments) in sorted(self.calls.items()))
        text = "".join(self.texts)
        return Answer(text, self.finish_reason, placed(text, self.tokens) or None, calls, ended, index)


def _choice(choice: dict[str, Any]) -> Answer:
    message = choice.get("message")
    if message is None and not isinstance(choice.get("text"), str):
        raise Malformed("a choice without text and message")
    text = _text(message) if isinstance(message, dict) else choice.get("text") or ""
    calls = ((message or {}).get("tool_calls") or ()) if isinstance(message, dict) else ()
    functions = [call.get("function") or {} for call in calls]
    named = tuple((each.get("name") or "", each.get("arguments") or "") for each in functions)
    tokens = _tokens(choice.get("logprobs"))
    tokens = None if tokens is None else placed(text, tokens)
    return Answer(text, choice.get("finish_reason"), tokens, named, index=choice.get("index", 0))


def _text(message: dict[str, Any]) -> str:
    return "".join(message.get(name) or "" for name in TEXT_FIELDS)


def _tokens(logprobs: Any) -> list[Token] | None:
    """Return the tokens of either format of log-probabilities: chats' list, or completions' parallel lists."""
    if not isinstance(logprobs, dict):
        return None
    if isinstance(content := logprobs.get("content"), list):
        return [Token(_piece(each), each.get("logprob"), _top(each.get("top_logprobs"))) for each in content]
    texts, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(texts, list) or not isinstance(values, list):
        return None
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [Token(_piece(text), value, _top(top)) for text, value, top in zip(texts, values, tops, strict=False)]


def _top(top: Any) -> dict[str, float]:
    pairs = top.items() if isinstance(top, dict) else [(each, each["logprob"]) for each in top or ()]
    return _by_text((_piece(token), logprob) for token, logprob in pairs)


def _by_text(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the log-probability of each text, the first of several: the likeliest."""
    return dict(reversed(list(pairs)))


def _piece(token: dict[str, Any] | str) -> str:
    """Return a token as text. Parts of characters have bytes in chats, and names as ``bytes:\\xf0`` in completions."""
    if isinstance(token, str):
        return re.sub(r"(\\x[0-9a-f]{2})+", INCOMPLETE, token[6:]) if token.startswith("bytes:") else token
    data = token.get("bytes")
    return bytes(data).decode(errors="replace") if data else token.get("token") or ""


def placed(text: str, tokens: Sequence[Token]) -> tuple[Token, ...]:
    """Return tokens with their offsets in the text, which may lack leading white space of the tokens.

    A character of several tokens belongs to the last of them; a server writes the others as replacement characters.
    """
    while tokens and not text[:1].isspace() and tokens[0].text.isspace():
        tokens = tokens[1:]
    if tokens and not text.startswith(" ") and (stripped := tokens[0].text.lstrip(" ")) != tokens[0].text:
        top = _by_text((each.lstrip(" ") or each, logprob) for each, logprob in tokens[0].top.items())
        tokens = [Token(stripped, tokens[0].logprob, top), *tokens[1:]]
    found, start = [], 0
    for token in tokens:
        found.append(Token(token.text, token.logprob, token.top, start))
        whole = token.text.strip("\ufffd")
        at = text.find(whole, start, start + len(whole) + 4)  # after the rest of a character
        start = min(len(text), start + len(whole)) if at < 0 else at + len(whole)  # or cut by a stop string
    return tuple(found)
