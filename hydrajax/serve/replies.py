"""The bodies of answers, in the words of OpenAI's interface."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hydrajax.serve.requests import RequestHandle

ENDS = {"eos": "stop", "stop": "stop"}  # every other end is "length": the limit, the context, or broken off


class Piece(NamedTuple):
    """Of an answer: its text and tokens, and for each token its log-probability and the likeliest in its place."""

    text: str
    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class Choice:
    """A ticket's answer, and how much of it has been shown.

    logprobs, drafts: whether to tell of the tokens' log-probabilities, and of which were drafted. alternatives: of how
    many of the likeliest tokens to tell beside each.
    """

    def __init__(
        self,
        index: int,
        ticket: RequestHandle,
        token_text: Callable[[int], str],
        logprobs: bool,
        alternatives: int = 0,
        drafts: bool = False,
    ):
        self.index, self.ticket = index, ticket
        self._token_text, self._logprobs, self._drafts = token_text, logprobs, drafts
        self._alternatives = alternatives
        self._shown, self._tokens, self._offset = 0, 0, 0
        self.ended = False  # and that has been shown

    @property
    def reason(self) -> str:
        result = self.ticket.result
        return ENDS.get((result and result.finish_reason) or "", "length")

    def more(self) -> Piece:
        """What has not been shown."""
        result = self.ticket.result  # once: another thread may replace it
        if result is None:
            return Piece("", [], [], [])
        # Without a tokenizer the ids are the text.
        text = " ".join(map(str, result.output_ids)) if result.text is None else result.text
        piece, self._shown = text[self._shown :], len(text)
        first, self._tokens = self._tokens, result.new_tokens
        ids, top = result.output_ids[first:], (result.top_logprobs or [])[first:]
        top = [place[: self._alternatives] for place in top] or [[]] * len(ids)
        return Piece(piece, ids, (result.logprobs or [])[first:], top)

    def drafts(self, ids: list[int]) -> list[dict[str, Any]] | None:
        """Of the last tokens that were shown whether they were drafted: all of a step but the first, its root."""
        if not self._drafts or self.ticket.result is None:
            return None
        roots = set(itertools.accumulate(self.ticket.result.step_lengths, initial=0))
        return [
            {"text": self._token_text(token), "drafted": number not in roots}
            for number, token in enumerate(ids, start=self._tokens - len(ids))
        ]

    def completion_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens, offsets = [self._token_text(token) for token in piece.ids], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        top = None
        if self._alternatives:
            top = list(map(self._by_text, piece.top, tokens, piece.logprobs))
        return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": top, "text_offset": offsets}

    def _by_text(self, place: list[tuple[int, float]], token: str, logprob: float) -> dict[str, float]:
        """The likeliest tokens in a place and the one that is there. Of tokens of one text the likeliest counts."""
        found: dict[str, float] = {}
        for other, its_own in place:
            found.setdefault(self._token_text(other), its_own)
        return {token: logprob} | found if token not in found else found

    def chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for token, logprob, place in zip(piece.ids, piece.logprobs, piece.top, strict=True):
            top = [self._chat_token(other, its_own) for other, its_own in place]
            content.append(self._chat_token(token, logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Form:
    """What a kind of request is answered in: whole, or piece by piece."""

    name: str
    chunk_name: str
    prefix: str

    def __init__(self, model: str):
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.name,
            "choices": [self._whole(choice) for choice in choices],
            "usage": usage,
            "hydrajax": notes(choices),
        }

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """The events for what is new of a choice; none where nothing is."""
        found, ended = [], choice.ticket.done  # asked first: then whatever there is comes before the end
        piece = choice.more()
        if piece.text or piece.ids:
            found.append(self._chunk([self._piece(choice, piece)]))
            if (drafts := choice.drafts(piece.ids)) is not None:
                found[-1]["hydrajax"] = {"tokens": drafts}
        if ended and not choice.ended:
            choice.ended = True
            found.append(self._chunk([self._end(choice)]))
        return found

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return []

    def closing(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The event with the counts."""
        return self._chunk([]) | {"usage": usage, "hydrajax": notes(choices)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_name, "choices": choices}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class Completion(Form):
    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def _whole(self, choice):
        return self._piece(choice, choice.more()) | {"finish_reason": choice.reason}

    def _piece(self, choice, piece):
        logprobs = choice.completion_logprobs(piece)
        return {"index": choice.index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def _end(self, choice):
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.reason}


class ChatCompletion(Form):
    name, chunk_name = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, choices):
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": choice.index, "delta": delta, "finish_reason": None}]) for choice in choices]

    def _whole(self, choice):
        piece = choice.more()
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = choice.chat_logprobs(piece)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def _piece(self, choice, piece):
        logprobs = choice.chat_logprobs(piece)
        return {"index": choice.index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": None}

    def _end(self, choice):
        return {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.reason}


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Counts of tokens. Of the ``n`` choices for a prompt only the first counts it."""
    results = [choice.ticket.result for choice in choices if choice.ticket.result is not None]
    tokens, steps = sum(result.new_tokens for result in results), sum(result.steps for result in results)
    firsts = [choice.ticket for choice in choices[::n]]
    prompt = sum(len(ticket.request.ids) for ticket in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(ticket.cached for ticket in firsts)},
        "completion_tokens_details": {"accepted_prediction_tokens": tokens - steps},
    }


def notes(choices: Sequence[Choice]) -> dict[str, Any]:
    """What OpenAI's interface has no words for: each choice's seed (None of a greedy one) and decode steps."""
    results = [choice.ticket.result for choice in choices]
    return {
        "seeds": [choice.ticket.request.seed for choice in choices],
        "steps": [0 if result is None else result.steps for result in results],
    }
