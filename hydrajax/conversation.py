"""A conversation that keeps the key-value cache: each turn feeds the base only what is new."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from hydrajax.decoding.decode_loop import next_burst
from hydrajax.decoding.executor import Executor, State
from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.decoding.sampling import row_keys
from hydrajax.decoding.spec import sampling_params
from hydrajax.errors import HydrajaxError
from hydrajax.generation import growing_text, seed_for
from hydrajax.text.templates import make_encoder


@dataclass
class Turn:
    """What an answer took. prompt_tokens: of the whole conversation before it, of which ``reused`` were in the cache.

    seconds: of decoding, from the question to the last token, compilation included in a session's first turns.
    """

    prompt_tokens: int = 0
    reused: int = 0
    new_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    full: bool = False  # the context is full: the answer was cut by it


class Chat:
    """A conversation with a model, which keeps the KV cache between turns.

    `say` adds a message and yields the answer's text. ``messages`` is the conversation so far and may be edited between
    turns; ``turn`` tells what the last answer took. The cache is kept as long as the conversation, written out by the
    template, begins with the very tokens that it holds. Where it does not (an edited message, an answer that was
    interrupted, a template that rewrites what is past), the turn starts from an empty cache.
    """

    def __init__(self, executor: Executor, *, template: str = "auto", seed: int | None = None):
        """Begin a conversation.

        Args:
            executor: decodes; its spec's ``max_new_tokens`` is the limit of an answer.
            template: chat template: ``auto`` for the tokenizer's own; ``vicuna``, ``plain`` and ``raw`` are built in.
            seed: for rules that draw. None draws one, which the attribute ``seed`` tells.

        Raises:
            HydrajaxError: where there is no tokenizer, or where it cannot be used with the template.
        """
        if executor.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer, and a conversation needs one")
        self._encoder = make_encoder(executor.tokenizer, template)
        self._executor, self._config = executor, executor.model.config
        self._context = self._config.max_positions
        self.seed = seed_for(executor.spec.rule, seed)
        self._state: State | None = None
        self._held: list[int] = []  # the tokens in the cache
        self._turns = 0
        self.messages: list[dict[str, str]] = []
        self.turn = Turn()

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages, self._state, self._held = [], None, []

    def say(self, message: str) -> Iterator[str]:
        """Answer a message, piece by piece. ``turn`` says afterwards what it took.

        An answer that is broken off (the iterator closed, Ctrl-C) stays in the conversation as far as it was yielded.
        Raises `HydrajaxError`, and forgets the message, where it is empty or the context has no room for it.
        """
        if not message.strip():
            raise HydrajaxError("message: is empty")
        try:
            message.encode()
        except UnicodeEncodeError:  # of a terminal or a pipe whose bytes are no text
            raise HydrajaxError("message: is not valid Unicode text") from None
        self.messages.append({"role": "user", "content": message})
        try:
            ids = self._written_out()
        except HydrajaxError:
            self.messages.pop()
            raise
        said = ""
        try:
            for piece in self._answer(ids):
                said += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": said})

    def _written_out(self) -> list[int]:
        """The conversation up to the answer that is to come, as token ids."""
        found = self._encoder.special.search(self.messages[-1]["content"])
        if found:
            raise HydrajaxError(f"message: holds the text of the special token {found[0]}")
        ids = self._encoder.prompt(self.messages)
        if len(ids) >= self._context:
            raise HydrajaxError(
                f"message: the conversation would have {len(ids)} tokens, the model's context is {self._context}"
            )
        return ids

    def _answer(self, ids: list[int]) -> Iterator[str]:
        began, executor = time.perf_counter(), self._executor
        keys = row_keys(jax.random.key(self.seed or 0), 1, self._turns)
        sampling = sampling_params([executor.spec], keys, self._config.vocab_size)
        self._turns += 1
        held, state = self._held, self._state
        self._held, self._state = [], None  # until the turn has ended well
        reused = len(held) if state is not None and len(held) < len(ids) and ids[: len(held)] == held else 0
        self.turn = Turn(prompt_tokens=len(ids), reused=reused)
        if reused:
            more, count = right_padded([ids[reused:]], bucket(len(ids) - reused, self._context - reused))
            state = executor.extend(state, more, count, sampling)
        else:
            prompt, count = right_padded([ids], bucket(len(ids), self._context))
            slots = executor.engine.cache_slots(self._context)  # room for the whole conversation
            state = executor.prefill(prompt, count, sampling, slots)
        text = growing_text(executor.tokenizer, ())
        done, steps = False, 1
        while not done:
            asked = time.perf_counter()
            state, now = executor.advance(state, np.zeros(1, bool), steps)
            steps = next_burst(steps, time.perf_counter() - asked)
            done, emitted = bool(now.done[0]), now.tokens[0, : now.lengths[0]].tolist()
            self.turn.new_tokens, self.turn.steps = len(emitted), int(now.steps[0])
            self.turn.seconds = time.perf_counter() - began
            if piece := text.grow(emitted, final=done):
                yield piece
        self.turn.full = len(ids) + len(emitted) >= self._context
        self._held, self._state = ids + emitted, state
