"""A conversation that keeps the KV cache: each turn prefills only the new tokens."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydrajax.decoding.decode_loop import next_burst
from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.processing import TokenCounts, count_tokens
from hydrajax.decoding.prompt_batch import bucket, common_length, right_padded
from hydrajax.decoding.request import Request, sampling_params
from hydrajax.decoding.state_snapshots import StateSnapshots
from hydrajax.errors import HydrajaxError
from hydrajax.sequences import drawn, growing_text, keys_of
from hydrajax.text.templates import make_encoder

SNAPSHOTS = 8  # of recurrent layers' states


@dataclass
class Turn:
    """The counts and the time of one answer.

    Attributes:
        prompt_tokens: tokens of the conversation before the answer.
        reused: prompt tokens that were in the KV cache.
        new_tokens: tokens of the answer.
        steps: decode steps.
        seconds: from the message to the last token; a session's first turns include compilation.
        first_tokens, first_seconds: tokens of the first step, and the time until then, which has all compilation.
        full: the context is full and cut the answer off.
    """

    prompt_tokens: int = 0
    reused: int = 0
    new_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    first_tokens: int = 0
    first_seconds: float = 0.0
    full: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first step, without prefill and compilation; None if there was only one step."""
        seconds = self.seconds - self.first_seconds
        return (self.new_tokens - self.first_tokens) / seconds if self.steps > 1 and seconds else None


class Chat:
    """A conversation with a model.

    The KV cache is reused as long as the conversation, written in the chat template, starts with the cached tokens.
    Otherwise (an edited message, a template that rewrites earlier turns) the turn keeps the common beginning; with
    recurrent layers, up to a snapshot of their states. After an interrupted answer it starts with an empty cache.

    Attributes:
        messages: the conversation, a list of ``{"role": ..., "content": ...}``; may be edited between turns.
        turn: the counts of the last answer.
        seed: of the sampling rule, None for rules without randomness.

    Example:
        ```python
        chat = m.chat()
        for piece in chat.send("Hello"):
            print(piece, end="")
        ```
    """

    def __init__(
        self, executor: Executor, *, template: str = "auto", seed: int | None = None, chat_template_kwargs: Any = None
    ):
        """Start a conversation.

        Args:
            executor: decodes; ``max_new_tokens`` of its request limits each answer.
            template: chat template: ``auto`` for the tokenizer's, ``vicuna``, ``plain``, ``raw``, or a file in Jinja.
            seed: for sampling rules; None draws one.
            chat_template_kwargs: mapping, variables of the template, such as ``{"enable_thinking": False}``.

        Raises:
            HydrajaxError: without a tokenizer, for a template that the tokenizer does not support, and for variables
                that the template does not have.
        """
        if executor.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer, which a conversation needs")
        self._encoder = make_encoder(executor.tokenizer, template).with_variables(chat_template_kwargs or {})
        self._executor, self._config = executor, executor.model.config
        self._context = self._config.max_positions
        self._request = drawn(executor, executor.request.replace(seed=seed))
        self._state: State | None = None
        self._cached: list[int] = []  # the tokens in the KV cache
        self._snapshots = StateSnapshots.of(self._config, SNAPSHOTS)
        self._turns = 0
        self.messages: list[dict[str, str]] = []
        self.turn = Turn()

    @property
    def seed(self) -> int | None:
        return self._request.seed

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages, self._state, self._cached = [], None, []
        self._snapshots = self._snapshots.until(0)

    def send(self, message: str) -> Iterator[str]:
        """Add a user message and yield the answer's text as it is generated.

        If the iterator is closed early, the text yielded so far stays in the conversation.

        Args:
            message: the user's text.

        Yields:
            Pieces of the answer.

        Raises:
            HydrajaxError: if the message is empty or too long for the context; it is then not added.
        """
        if not message.strip():
            raise HydrajaxError("message: is empty")
        try:
            message.encode()
        except UnicodeEncodeError:  # bytes of a terminal or a pipe that are not text
            raise HydrajaxError("message: is not valid Unicode text") from None
        self.messages.append({"role": "user", "content": message})
        try:
            ids = self._encode()
        except HydrajaxError:
            self.messages.pop()
            raise
        answer = ""
        try:
            for piece in self._answer(ids):
                answer += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": self._content(answer)})

    def _content(self, answer: str) -> str:
        """Return an answer as a message. Some templates write the space before it, as Vicuna's does."""
        prompt = self._encoder.render(self.messages, prompt=True)
        whole = self._encoder.render([*self.messages, {"role": "assistant", "content": answer}], prompt=False)
        return answer if whole.startswith(prompt + answer) else answer.removeprefix(" ")

    def _encode(self) -> list[int]:
        """Return the token ids of the conversation, up to the next answer."""
        special = self._encoder.special.search(self.messages[-1]["content"])
        if special:
            raise HydrajaxError(f"message: contains the special token {special[0]}; remove it")
        ids = self._encoder.prompt(self.messages)
        if len(ids) >= self._context:
            raise HydrajaxError(
                f"message: got a conversation of {len(ids)} tokens, expected less than the context of {self._context}"
            )
        return ids

    def _answer(self, ids: list[int]) -> Iterator[str]:
        began, executor = time.perf_counter(), self._executor
        request = self._request.replace(number=self._turns)
        sampling = sampling_params([request], keys_of([request]), self._config.vocab_size)
        self._turns += 1
        cached, state = self._cached, self._state
        self._cached, self._state = [], None  # until the turn is complete
        shared = common_length(np.array(cached), np.array(ids[:-1]))  # at least one token is read
        reused = self._snapshots.start(shared, len(cached))
        self.turn = Turn(prompt_tokens=len(ids), reused=reused)
        if 0 < reused < len(cached):  # an answer may be split into other tokens as part of a prompt
            counting = count_tokens(sampling.processors)
            counts = TokenCounts.of_text(np.array(ids[:reused]), self._config.vocab_size) if counting else None
            state = executor.rewind(state, np.array([reused], np.int32), counts, self._snapshots.at(reused))
        snapshots, at = self._snapshots.until(reused), reused
        stops = snapshots.stops(reused, shared, len(ids))
        while at < len(ids):
            if at in stops:
                snapshots = snapshots.taken(at, executor.snapshot(state))
            until = next((stop for stop in stops if stop > at), len(ids))
            chunk, count = right_padded([ids[at:until]], bucket(until - at, self._context - at))
            if at:
                state = executor.extend(state, chunk, count, sampling)
            else:
                slots = executor.engine.cache_slots(self._context)  # for the whole conversation
                state = executor.prefill(chunk, count, sampling, slots)
            at = until
        self._snapshots = snapshots
        text = growing_text(executor.tokenizer, Request(), ids)
        done, steps = False, 1
        while not done:
            asked = time.perf_counter()
            state, now = executor.advance(state, np.zeros(1, bool), steps)
            steps = next_burst(steps, time.perf_counter() - asked)
            done, emitted = bool(now.done[0]), now.tokens[0, : now.lengths[0]].tolist()
            self.turn.new_tokens, self.turn.steps = len(emitted), int(now.steps[0])
            self.turn.seconds = time.perf_counter() - began
            if not self.turn.first_seconds:
                self.turn.first_tokens, self.turn.first_seconds = len(emitted), self.turn.seconds
            if piece := text.grow(emitted, final=done):
                yield piece
        if (corpus := executor.params.corpus) is not None:
            corpus.remember(emitted, ids)
        self.turn.full = len(ids) + len(emitted) >= self._context
        self._cached, self._state = ids + emitted, state
