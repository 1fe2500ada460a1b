"""From what clients write to token ids."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np

from hydrajax.decoding.prompt_batch import encode_prompt
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.text.prompt import Prompt
from hydrajax.text.templates import make_encoder


class Encoder:
    """Texts and conversations as checked ids. Called from several threads, one at a time is served.

    template: as in `hydrajax.conversation.Chat`; ``auto`` is the tokenizer's own, and where it has none only
    conversations are refused. longest: of a prompt, in tokens.

    Raises `HydrajaxError` for a template that is named and cannot be used.
    """

    def __init__(self, tokenizer: Any, config: LlamaConfig, template: str = "auto", longest: int | None = None):
        # The batcher's thread decodes with the tokenizer; one that encodes may have to change its settings for it.
        self._tokenizer, self._config = copy.deepcopy(tokenizer), config
        self._lock, self._longest = threading.Lock(), longest
        self._no_template, self._chat = "", None
        try:
            if self._tokenizer is None:
                raise HydrajaxError("messages: the base has no tokenizer; give token ids to /v1/completions")
            self._chat = make_encoder(self._tokenizer, template)
        except HydrajaxError as error:
            if template != "auto":
                raise
            self._no_template = str(error)

    @property
    def takes_conversations(self) -> bool:
        return self._chat is not None

    def prompt(self, content: str | list[int]) -> np.ndarray:
        """Of a text or token ids, int32 ``[P]``."""
        with self._lock:
            ids = Prompt(content, "prompt").ids(self._tokenizer)
        return self._checked(ids, "prompt")

    def conversation(self, messages: list[dict[str, str]]) -> np.ndarray:
        """Of messages up to where the answer begins."""
        if self._chat is None:
            raise HydrajaxError(self._no_template)
        for number, message in enumerate(messages):
            if found := self._chat.special.search(message["content"]):
                raise HydrajaxError(f"messages.{number}: holds the text of the special token {found[0]}")
        with self._lock:
            ids = self._chat.prompt(messages)
        return self._checked(ids, "messages")

    def token_text(self, token: int) -> str:
        """One token, as lists of log-probabilities show it."""
        if self._tokenizer is None:
            return str(token)
        with self._lock:
            return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _checked(self, ids: list[int], where: str) -> np.ndarray:
        if self._longest is not None and len(ids) > self._longest:
            raise HydrajaxError(f"{where}: has {len(ids)} tokens, at most {self._longest} are taken")
        return encode_prompt(Prompt(ids, where), where, None, self._config)
