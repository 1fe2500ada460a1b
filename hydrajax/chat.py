"""A conversation that keeps the key-value cache: each turn feeds the base only what is new."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from hydrajax.bundle import Bundle
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.loop import next_burst
from hydrajax.decoding.prompts import bucket, right_padded
from hydrajax.decoding.sampling import row_keys
from hydrajax.decoding.state import DecodeState
from hydrajax.errors import HydrajaxError
from hydrajax.generation import seed_for
from hydrajax.ssd.decode import are_apart
from hydrajax.text.stopping import GrowingText
from hydrajax.text.templates import make_encoder
from hydrajax.text.tokenizer import decode_text
from hydrajax.trees.dynamic import CandidateTree


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
    """A conversation with a loaded base, in its tokenizer's chat template or a named one.

    template: ``auto`` is the tokenizer's own; ``vicuna`` and ``plain`` are built in. seed: of what the rule draws; None
    draws one, and the attribute of this name says which. `say` adds a message and yields
    the answer's text; ``messages`` is the conversation so far and may be edited between turns.

    The cache is kept as long as the conversation, written out by the template, begins with the very tokens it holds.
    Where it does not (an edited message, an answer that was interrupted, a template that rewrites what is past), the
    turn starts from an empty cache. Raises `HydrajaxError` where tokenizer and template do not go together.
    """

    def __init__(
        self,
        loaded: Bundle,
        *,
        tree: CandidateTree | None = None,
        rule: AcceptanceRule | None = None,
        template: str = "auto",
        max_new_tokens: int = 512,
        seed: int | None = None,
    ):
        if loaded.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer, and a conversation needs one")
        if max_new_tokens < 1:
            raise HydrajaxError(f"max_new_tokens: must be at least 1, found {max_new_tokens}")
        if are_apart(loaded.params):
            raise HydrajaxError(
                "draft_devices: a conversation keeps its caches from turn to turn, which base and draft apart do not"
            )
        self._encoder = make_encoder(loaded.tokenizer, template)
        self._loaded, self._limit = loaded, max_new_tokens
        self._context = loaded.model.config.max_positions
        # As many new tokens as the context holds, so that the cache has room for the whole conversation.
        self._rule = rule or Greedy()
        self.seed = seed_for(self._rule, seed)
        self._bursts = loaded.bursts(tree or loaded.default_tree(), self._rule, self._context)
        self._state: DecodeState | None = None
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
        began = time.perf_counter()
        keys = row_keys(jax.random.key(self.seed or 0), 1, self._turns)
        self._turns += 1
        held, state = self._held, self._state
        self._held, self._state = [], None  # until the turn has ended well
        reused = len(held) if state is not None and len(held) < len(ids) and ids[: len(held)] == held else 0
        self.turn = Turn(prompt_tokens=len(ids), reused=reused)
        limit = np.array([self._limit], np.int32)
        params = self._loaded.params
        if reused:
            more, count = right_padded([ids[reused:]], bucket(len(ids) - reused, self._context - reused))
            state = self._bursts.extend(params, state, more, count, keys, self._rule, limit)
        else:
            prompt, count = right_padded([ids], bucket(len(ids), self._context))
            state = self._bursts.start(params, prompt, count, keys, self._rule, limit)
        text = GrowingText(lambda ids: decode_text(self._loaded.tokenizer, ids))
        done, steps = False, 1
        while not done:
            asked = time.perf_counter()
            state, now = self._bursts.advance(params, state, np.zeros(1, bool), steps)
            steps = next_burst(steps, time.perf_counter() - asked)
            done, emitted = bool(now.done[0]), now.tokens[0, : now.lengths[0]].tolist()
            self.turn.new_tokens, self.turn.steps = len(emitted), int(now.steps[0])
            self.turn.seconds = time.perf_counter() - began
            if piece := text.grow(emitted, final=done):
                yield piece
        self.turn.full = len(ids) + len(emitted) >= self._context
        self._held, self._state = ids + emitted, state
