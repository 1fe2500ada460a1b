"""The bodies of answers, in the words of OpenAI's interface."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hydrajax.serve.requests import Ticket

ENDS = {"eos": "stop", "stop": "stop"}  # every other end is "length": the limit, the context, or broken off


class Choice:
    """A ticket's answer, and how much of it has been shown.

    logprobs, drafts: whether to tell of the tokens' log-probabilities, and of which were drafted.
    """

    def __init__(
        self, index: int, ticket: Ticket, token_text: Callable[[int], str], logprobs: bool, drafts: bool = False
    ):
        self.index, self.ticket = index, ticket
        self._token_text, self._logprobs, self._drafts = token_text, logprobs, drafts
        self._shown, self._tokens, self._offset = 0, 0, 0
        self.ended = False  # and that has been shown

    @property
    def reason(self) -> str:
        result = self.ticket.result
        return ENDS.get((result and result.finish_reason) or "", "length")

    def more(self) -> tuple[str, list[int], list[float]]:
        """Text, tokens and log-probabilities that have not been shown."""
        result = self.ticket.result  # once: another thread may replace it
        if result is None:
            return "", [], []
        # Without a tokenizer the ids are the text.
        text = " ".join(map(str, result.output_ids)) if result.text is None else result.text
        piece, self._shown = text[self._shown :], len(text)
        first, self._tokens = self._tokens, result.new_tokens
        return piece, result.output_ids[first:], (result.logprobs or [])[first:]

    def drafts(self, ids: list[int]) -> list[dict[str, Any]] | None:
        """Of the last tokens that were shown whether they were drafted: all of a step but the first, its root."""
        if not self._drafts or self.ticket.result is None:
            return None
        roots = set(itertools.accumulate(self.ticket.result.step_lengths, initial=0))
        return [
            {"text": self._token_text(token), "drafted": number not in roots}
            for number, token in enumerate(ids, start=self._tokens - len(ids))
        ]

    def completion_logprobs(self, ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens, offsets = [self._token_text(token) for token in ids], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def chat_logprobs(self, ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens = [self._token_text(token) for token in ids]
        return {
            "content": [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ],
            "refusal": None,
        }


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
        text, ids, logprobs = choice.more()
        if text or ids:
            found.append(self._chunk([self._piece(choice, text, ids, logprobs)]))
            if (drafts := choice.drafts(ids)) is not None:
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

    def _piece(self, choice: Choice, text: str, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class Completion(Form):
    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def _whole(self, choice):
        text, ids, logprobs = choice.more()
        return self._piece(choice, text, ids, logprobs) | {"finish_reason": choice.reason}

    def _piece(self, choice, text, ids, logprobs):
        logprobs = choice.completion_logprobs(ids, logprobs)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _end(self, choice):
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.reason}


class ChatCompletion(Form):
    name, chunk_name = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, choices):
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": choice.index, "delta": delta, "finish_reason": None}]) for choice in choices]

    def _whole(self, choice):
        text, ids, logprobs = choice.more()
        message = {"role": "assistant", "content": text, "refusal": None}
        logprobs = choice.chat_logprobs(ids, logprobs)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def _piece(self, choice, text, ids, logprobs):
        logprobs = choice.chat_logprobs(ids, logprobs)
        return {"index": choice.index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

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
