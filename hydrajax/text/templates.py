"""Chat templates: messages as text and as token ids, in the template of a tokenizer or in a built-in one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError, not_allowed, one_line
from hydrajax.text.tokenizer import run_tokenizer

# What Vicuna was trained with where a conversation brings no system message of its own.
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

# Jinja, as the tokenizers' own. Neither writes BOS: it is added as for any text, where the tokenizer adds it.
BUILT_IN = {
    # Vicuna v1.1: SYSTEM USER: question ASSISTANT: answer</s>USER: question ASSISTANT: answer</s>
    "vicuna": (
        "{% if messages[0].role != 'system' %}{{ '" + VICUNA_SYSTEM.replace("'", "\\'") + " ' }}{% endif %}"
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + ' ' }}"
        "{% elif message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + message.content + eos_token }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    # For a base model that knows no chat: one message after the other, an answer closed by the end of text.
    "plain": (
        "{% for message in messages %}"
        "{{ message.content + (eos_token if message.role == 'assistant' else '\n') }}"
        "{% endfor %}"
    ),
    # For a base model that goes on where a text ends, such as the first lines of a function. Without white space at the
    # end: many tokenizers join a line end with the indentation behind it, and after one alone a model finds no way on.
    "raw": (
        "{% for message in messages %}"
        "{{ message.content + eos_token if message.role == 'assistant' else message.content.rstrip() }}"
        "{% endfor %}"
    ),
}


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and a template, with all that every conversation needs of them. Made by `make_encoder`.

    source:  the template, as Jinja text.
    own:     whether the template is the tokenizer's own, which writes BOS itself; ours leave BOS to the tokenizer.
    special: a pattern that finds the text of any special token.
    marks:   int32 ids of all tokens that were added to the vocabulary, special or not: one of them ends a turn.
    """

    tokenizer: Any
    source: str
    own: bool
    special: re.Pattern
    marks: Int[np.ndarray, " n"]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the messages (``role``, ``content``) and of what opens the assistant's next one."""
        return self.tokenize(self.render(messages, prompt=True))[0].tolist()

    def render(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        """The messages as text; with ``prompt``, what opens the assistant's next message follows them."""
        return run_template(
            self.tokenizer.apply_chat_template,
            messages,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    def tokenize(self, text: str) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, "n 2"]]:
        """Token ids of rendered text, int32, and where in the text each token begins and ends.

        Raises `HydrajaxError` for text that no tokenizer reads.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise HydrajaxError("is not valid Unicode text (it holds a lone surrogate)") from None
        encoded = run_tokenizer(
            self.tokenizer, text, add_special_tokens=not self.own, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["offset_mapping"])
        length = int(np.flatnonzero(offsets[:, 1])[-1]) + 1  # without an EOS added to the one our templates write
        if length > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            raise HydrajaxError("the chat template writes BOS twice")
        return ids[:length], offsets[:length]


def make_encoder(
    tokenizer: Any, template: str = "auto", *, field: str = "template", tokenizer_field: str = "base"
) -> Encoder:
    """What writes conversations for this tokenizer in the named template.

    tokenizer: of transformers. template: ``auto`` for the tokenizer's own, or a name in `BUILT_IN`. field,
    tokenizer_field: what messages call the option or setting that named the template and the tokenizer.

    Raises `HydrajaxError` where the tokenizer cannot be used with the template.
    """
    if template != "auto" and template not in BUILT_IN:
        raise not_allowed(field, template, ("auto", *BUILT_IN))
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise HydrajaxError(f"{tokenizer_field}: {kind} is not a fast tokenizer; only those tell where a token stands")
    source = _own_template(tokenizer, field) if template == "auto" else BUILT_IN[template]
    if template != "auto" and not tokenizer.eos_token:
        raise HydrajaxError(f"{field}: {template} ends answers by the tokenizer's EOS token, and it has none")
    added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
    pattern = "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True))
    marks = sorted({*added, *tokenizer.all_special_ids})
    return Encoder(tokenizer, source, template == "auto", re.compile(pattern or "(?!)"), np.array(marks, np.int32))


def _own_template(tokenizer: Any, field: str) -> str:
    if not tokenizer.chat_template:
        built_in = ", ".join(BUILT_IN)
        raise HydrajaxError(f"{field}: the tokenizer has no chat template of its own; built in are {built_in}")
    try:
        return tokenizer.get_chat_template()  # of several, its default
    except ValueError as error:
        raise HydrajaxError(f"{field}: {one_line(error)}") from None


def run_template(render: Callable, *args, **settings) -> Any:
    """``render(...)``, with whatever the template's program raises as a `HydrajaxError`."""
    try:
        return render(*args, **settings)
    except Exception as error:  # a template is a program of the tokenizer's author: anything may be raised
        raise HydrajaxError(f"the chat template failed: {one_line(error)}") from None
