"""Response bodies of the OpenAI-compatible API."""

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hydrajax.serve.api_errors import error_body
from hydrajax.serve.harmony import MarkedText
from hydrajax.serve.prompt_scores import TextScores, prompt_logprobs
from hydrajax.serve.requests import RequestHandle
from hydrajax.serve.tool_calls import CallDeltas, CallReader
from hydrajax.text.continuation import INCOMPLETE, Continuation
from hydrajax.text.marking import text_of

FINISH_REASONS = {"eos": "stop", "stop": "stop"}  # all others are "length": limit, context, cancelled


class Delta(NamedTuple):
    """New text, tool calls and tokens of an answer, and at each position log-probability and most likely tokens."""

    text: str
    calls: list[dict[str, Any]]
    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    reasoning: str = ""


class ReplyChoice:
    """One choice of a response: a request's answer, and how much of it has been sent.

    Attributes:
        after: Return the continuation of a prompt.
        logprobs, drafts: Include log-probabilities, and marks of drafted tokens.
        top_logprobs: Number of most likely tokens at each position.
        echo: Text before the answer's, None for none. With ``logprobs`` it has log-probabilities too, from ``scores``.
        calls: Format of the tool calls in the answer, None if there are none.
        scores: Of the prompt's tokens, or of those and the answer's; None if nobody asked for them.
    """

    scores: TextScores | None = None

    def __init__(
        self,
        index: int,
        handle: RequestHandle,
        after: Callable[[Sequence[int]], Continuation],
        logprobs: bool,
        top_logprobs: int = 0,
        drafts: bool = False,
        echo: str | None = None,
        calls: CallReader | None = None,
    ):
        self.index, self.handle = index, handle
        self._logprobs, self._top, self._drafts = logprobs, top_logprobs, drafts
        self._after, self._echoes = after, echo is not None
        self._scored, self._marked = after(() if self._echoes else handle.request.ids), after(handle.request.ids)
        self._echo = (echo or "").rstrip(INCOMPLETE if self._marked.begun else "")
        self._sent, self._tokens, self._special = 0, 0, 0  # characters and tokens sent; characters of special tokens
        self._calls = None if calls is None else CallDeltas(calls)
        special = {} if calls is None else calls.special
        self._with_special = MarkedText(special, after(handle.request.ids)) if special else None
        self.ended = False  # its end has been sent

    @property
    def finish_reason(self) -> str:
        result = self.handle.result
        found = FINISH_REASONS.get((result and result.finish_reason) or "", "length")
        return "tool_calls" if found == "stop" and self._calls is not None and self._calls.complete else found

    @property
    def usage(self) -> dict[str, int]:
        """Count the tokens that have been sent."""
        prompt = len(self.handle.request.ids)
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended the answer (vLLM's field)."""
        return self.handle.result and self.handle.result.stop_reason

    def delta(self, ended: bool) -> Delta:
        """Return the part of the answer that has not been sent; after its end all of it."""
        result = self.handle.result  # once, because another thread may replace it
        if result is None:
            return Delta("", [], [], [], [])
        text = self._echo + text_of(result)
        if self._calls is not None:
            text = text if self._with_special is None else self._with_special.of(result, text)
            new, calls = self._calls.new(text, ended)
        else:
            new, self._sent, calls = text[self._sent :], len(text), []
        first, self._tokens = self._tokens, result.new_tokens
        ids, top = result.output_ids[first:], (result.top_logprobs or [])[first:]
        top = [tokens[: self._top] for tokens in top] or [[]] * len(ids)
        reasoning = "" if self._calls is None else self._calls.reasoning
        return Delta(new, calls, ids, (result.logprobs or [])[first:], top, reasoning)

    def reasoning_tokens(self) -> int:
        result = self.handle.result
        return 0 if result is None or self._calls is None else self._calls.form.reasoning_tokens(result.output_ids)

    def drafts(self, ids: list[int]) -> list[dict[str, Any]] | None:
        """Mark which of the last tokens were drafted: all tokens of a step except the first one, its root."""
        if not self._drafts or self.handle.result is None:
            return None
        roots = set(itertools.accumulate(self.handle.result.emitted_per_step, initial=0))
        return [
            {"text": self._marked.read(token), "drafted": number not in roots}
            for number, token in enumerate(ids, start=self._tokens - len(ids))
        ]

    def logprobs(self, delta: Delta, chat: bool) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content, tokens, logprobs, offsets, tops = [], [], [], [], []
        for token, logprob, top in self._rows(delta):
            if chat:
                others = [self._chat_token(other, its_own) for other, its_own in top]
                content.append(self._chat_token(token, logprob) | {"top_logprobs": others})
            else:
                tokens.append(self._scored.name(token))
                logprobs.append(logprob)
                offsets.append(self._scored.offset + self._special)
                tops.append(None if logprob is None else self._by_name(top[: self._top], token, logprob))
                if not self._scored.data(token) and self._echo.startswith(tokens[-1], offsets[-1]):
                    self._special += len(tokens[-1])
            self._scored.read(token)
        if chat:
            return {"content": content, "refusal": None}
        tops = tops if self._top else None
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _rows(self, delta: Delta) -> Iterator[tuple[int, float | None, list[tuple[int, float]]]]:
        """Yield new tokens with log-probability and most likely tokens, those of an echo first."""
        scores, answered = self.scores, zip(delta.ids, delta.logprobs, delta.top, strict=True)
        if self._echoes and scores is not None and self._tokens == len(delta.ids):  # nothing has been sent
            yield from zip(scores.ids, [None, *scores.logprobs[1:]], scores.top, strict=True)
            answered = answered if len(scores.ids) == len(self.handle.request.ids) else ()
        yield from answered

    def prompt_logprobs(self, k: int) -> dict[str, Any]:
        """Return vLLM's field of this name, with k most likely tokens."""
        return {"prompt_logprobs": prompt_logprobs(self.scores, len(self.handle.request.ids), k, self._after(()))}

    def _by_name(self, top: list[tuple[int, float]], token: int, logprob: float) -> dict[str, float]:
        """Map the most likely tokens and the chosen one to log-probabilities. One that shares its name has its id."""
        if token not in dict(top):
            top = [(token, logprob), *top]
        chosen, found = self._scored.name(token), {}
        for other, its_own in top:
            name = self._scored.name(other)
            taken = name in found or (name == chosen and other != token)
            found[f"token_id:{other}" if taken else name] = its_own
        return found

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        """Return a token as in chats. The bytes of all join to the text; a special token has none."""
        return {"token": self._scored.name(token), "logprob": logprob, "bytes": list(self._scored.data(token))}


class ReplyFormat:
    """The response to a chat or to a completion, whole or as a stream of events.

    Attributes:
        reasoning: Include the reasoning.
    """

    END = "data: [DONE]\n\n"  # of a stream
    reasoning = True

    def __init__(self, model: str, chat: bool, continuous_usage: bool = False, prompt_top: int | None = None):
        """``continuous_usage``: events of a stream have token counts so far. ``prompt_top``: most likely tokens of
        ``prompt_logprobs``, None without this field.
        """
        self._prompt_top = prompt_top
        self._chat, self._continuous_usage, prefix = chat, continuous_usage, "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[ReplyChoice], usage: dict[str, Any]) -> dict[str, Any]:
        found, scored = [], {}
        for choice in choices:
            delta = choice.delta(ended=True)
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            if delta.reasoning or delta.calls:
                message |= {"content": delta.text or None} | self._thoughts(delta)
            if delta.calls:
                calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta.calls]
                message["tool_calls"] = calls
            content = {"message": message} if self._chat else {"text": delta.text}
            if self._prompt_top is not None and not (self._chat and scored):  # a chat has one prompt
                scored = choice.prompt_logprobs(self._prompt_top)
                content |= {} if self._chat else scored
            found.append(self._choice(choice, content, choice.logprobs(delta, self._chat), choice.finish_reason))
        name = "chat.completion" if self._chat else "text_completion"
        scored = scored if self._chat else {}
        return {**self._head, "object": name, "choices": found, "usage": usage, **scored, **statistics(choices)}

    def opening(self, choices: Sequence[ReplyChoice]) -> list[dict[str, Any]]:
        """Return the first events of a stream."""
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self._chunk([{"index": choice.index, **first}]) for choice in choices if self._chat]

    def events(self, choice: ReplyChoice) -> list[dict[str, Any]]:
        """Return the events for the new part of a choice."""
        found, ended = [], choice.handle.done  # read first, so that the end follows all of the answer
        delta = choice.delta(ended)
        if delta.text or delta.ids or delta.calls or delta.reasoning:
            content = {"delta": self._chat_delta(delta)} if self._chat else {"text": delta.text}
            found.append(self._chunk([self._choice(choice, content, choice.logprobs(delta, self._chat), None)]))
            if (drafts := choice.drafts(delta.ids)) is not None:
                found[-1]["hydrajax"] = {"tokens": drafts}
        if ended and not choice.ended:
            choice.ended = True
            content = {"delta": {}} if self._chat else {"text": ""}
            found.append(self._chunk([self._choice(choice, content, None, choice.finish_reason)]))
        return [event | {"usage": choice.usage} for event in found] if self._continuous_usage else found

    def closing(self, choices: Sequence[ReplyChoice], usage_for: int | None) -> list[dict[str, Any]]:
        """Return the event with the token counts if they are wanted: for ``usage_for`` choices per prompt."""
        if usage_for is None:
            return []
        return [self._chunk([]) | {"usage": usage(choices, usage_for), **statistics(choices)}]

    def failed(self, message: str, status: int) -> list[dict[str, Any]]:
        """Return the event of an error."""
        return [error_body(message, status)]

    def _thoughts(self, delta: Delta) -> dict[str, str]:
        """Return the reasoning under the names that clients read: DeepSeek's, and vLLM's and OpenRouter's."""
        names = ("reasoning_content", "reasoning") if self.reasoning and delta.reasoning else ()
        return dict.fromkeys(names, delta.reasoning)

    def _chat_delta(self, delta: Delta) -> dict[str, Any]:
        found = self._thoughts(delta) | {"content": delta.text, "tool_calls": delta.calls}
        return {name: value for name, value in found.items() if value} or {"content": ""}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": choices}

    @staticmethod
    def _choice(choice: ReplyChoice, content: dict, logprobs: dict | None, finish_reason: str | None) -> dict[str, Any]:
        ended = {"finish_reason": finish_reason, "stop_reason": finish_reason and choice.stop_reason}
        return {"index": choice.index, **content, "logprobs": logprobs, **ended}


def usage(choices: Sequence[ReplyChoice], n: int) -> dict[str, Any]:
    """Count tokens; the prompt of ``n`` choices counts once."""
    results = [choice.handle.result for choice in choices if choice.handle.result is not None]
    tokens, steps = sum(result.new_tokens for result in results), sum(result.steps for result in results)
    firsts, drafts = [choice.handle for choice in choices[::n]], [choice.handle.drafts for choice in choices]
    prompt = sum(len(handle.request.ids) for handle in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(handle.cached for handle in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens() for choice in choices),
            "accepted_prediction_tokens": tokens - steps,
            "rejected_prediction_tokens": sum(each.drafted - each.accepted for each in drafts),
        },
    }


def statistics(choices: Sequence[ReplyChoice]) -> dict[str, Any]:
    """Return the fields beyond OpenAI's: vLLM's counts of a single choice that is drafted; each choice's seed (None if
    greedy) and decode steps.
    """
    results, drafts = [choice.handle.result for choice in choices], [choice.handle.drafts for choice in choices]
    counted = len(drafts) == 1 and len(drafts[0].histogram) > 1
    return {
        "metrics": {"speculative_decoding": drafts[0].summary()} if counted else None,
        "hydrajax": {
            "seeds": [choice.handle.request.wanted.seed for choice in choices],
            "steps": [0 if result is None else result.steps for result in results],
        },
    }
