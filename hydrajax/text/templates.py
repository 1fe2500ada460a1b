"""Conversations to token ids by a chat template, and which of the tokens the assistant has to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.train.data.conversations import BadRecord, Conversation
from hydrajax.train.data.rows import Document

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
}

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_conversation(tokenizer: Any, conversation: Conversation, template: str = "auto") -> Document:
    """The whole conversation in one tokenisation; targets are what the assistant says and the mark that ends it.

    tokenizer: a fast one of transformers. template: ``auto`` for its own, or a name in `BUILT_IN`. A target is every
    token that the model itself would have to write: all that follows the generation prompt, up to and including the
    special token that ends the turn. Where the template marks this by ``{% generation %}``, that is used; otherwise
    the conversation is rendered up to each answer and up to its end, and each text must begin the next.

    Raises `HydrajaxError` naming the conversation where the template refuses it, where its answers cannot be found
    again in the text, and where a message holds a special token's text, which would become that token; and, naming
    the setting, where tokenizer and template do not go together at all.
    """
    encoder = make_encoder(tokenizer, template)
    try:
        return encoder.encode(conversation)
    except HydrajaxError as error:
        raise HydrajaxError(f"{conversation.where}: {error}") from None


def encode_conversations(
    tokenizer: Any, conversations: Sequence[Conversation], template: str = "auto"
) -> tuple[list[Document], list[BadRecord]]:
    """`encode_conversation` of each, and those that it refuses. Raises `HydrajaxError` where it refuses all."""
    encoder = make_encoder(tokenizer, template)
    documents, bad = [], []
    for conversation in conversations:
        try:
            documents.append(encoder.encode(conversation))
        except HydrajaxError as error:
            bad.append(BadRecord(conversation.where, str(error)))
    if not documents:
        first = f"; the first: {bad[0].where}: {bad[0].reason}" if bad else ""
        raise HydrajaxError(f"data.template: none of {len(bad)} conversations can be encoded{first}")
    return documents, bad


def template_source(tokenizer: Any, template: str) -> str:
    """The Jinja text of a template's name. Raises `HydrajaxError` where the tokenizer cannot be used with it."""
    names = ", ".join(BUILT_IN)
    if template != "auto" and template not in BUILT_IN:
        raise HydrajaxError(f"data.template: found {template!r}, allowed are auto, {names}")
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise HydrajaxError(f"data.tokenizer: {kind} is not a fast tokenizer; only those tell where a token stands")
    if template != "auto":
        if not tokenizer.eos_token:
            raise HydrajaxError(f"data.template: {template} ends answers by the tokenizer's EOS token, and it has none")
        return BUILT_IN[template]
    if not tokenizer.chat_template:
        raise HydrajaxError(f"data.template: the tokenizer has no chat template of its own; built in are {names}")
    try:
        return tokenizer.get_chat_template()  # of several, its default
    except ValueError as error:
        raise HydrajaxError(f"data.template: {_first_line(error)}") from None


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and a template, with what is needed of them for every conversation. Made by `make_encoder`.

    own:     the template is the tokenizer's, which writes BOS itself; ours leave BOS to the tokenizer.
    special: matches the text of any special token.
    marks:   ids of all tokens added to the vocabulary, special or not: one of them ends a turn.
    """

    tokenizer: Any
    source: str
    own: bool
    special: re.Pattern
    marks: Int[np.ndarray, " n"]

    def encode(self, conversation: Conversation) -> Document:
        """As `encode_conversation`, whose errors have the conversation's place besides."""
        for number, message in enumerate(conversation.messages, start=1):
            if found := self.special.search(message.content):
                raise HydrajaxError(f"message {number} holds the text of the special token {found[0]}")
        answers = [message.content.strip() for message in conversation.messages if message.role == "assistant"]
        messages = [message._asdict() for message in conversation.messages]
        find = _marked_spans if _GENERATION.search(self.source) else _rendered_spans
        text, spans = find(self.tokenizer, messages, self.source)
        if len(spans) != len(answers):
            raise HydrajaxError(f"the chat template marks {len(spans)} answers of the {len(answers)} there are")
        ids, offsets = self._tokenize(text)
        starts, ends = _tiling(offsets)
        targets = np.zeros(len(ids), bool)
        for (start, end), answer in zip(spans, answers, strict=True):
            at = text.rfind(answer, start, end)
            if at < 0:
                raise HydrajaxError(f"the chat template changes the answer {answer[:40]!r}")
            first, last = np.flatnonzero((starts < end) & (ends > start))[[0, -1]]
            last = max(last, int(np.searchsorted(ends, end, side="right")) - 1)  # further bytes of the last character
            # A token may reach over the edge: with a space it still is the model's, with the template's words not.
            first += bool(text[starts[first] : start].strip())
            last -= bool(text[end : ends[last]].strip())
            behind = int(np.searchsorted(starts, at + len(answer)))  # the first token after the answer itself
            # A mark that follows {% generation %} at once is the model's to write too, unless it is the next BOS.
            limit = last + 1 + (last + 1 < len(ids) and ids[last + 1] != self.tokenizer.bos_token_id)
            marks = np.flatnonzero(np.isin(ids[behind:limit], self.marks))
            if len(marks):  # what follows the mark, such as a newline, is the template's
                targets[first : behind + marks[0] + 1] = True
            else:
                said = start + len(text[start:end].rstrip())
                targets[first : last + 1] = starts[first : last + 1] < said
        # A token without characters of its own is a further byte of the character before it.
        for index in np.flatnonzero(starts == ends):
            targets[index] = index > 0 and targets[index - 1]
        return Document(ids, targets)

    def prompt(self, messages: list[dict]) -> list[int]:
        """Token ids of the messages and of what opens the assistant's next one."""
        return self._tokenize(_render(self.tokenizer, messages, self.source, prompt=True))[0].tolist()

    def _tokenize(self, text: str) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, "n 2"]]:
        encoded = self.tokenizer(text, add_special_tokens=not self.own, return_offsets_mapping=True, verbose=False)
        ids, offsets = np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["offset_mapping"])
        length = int(np.flatnonzero(offsets[:, 1])[-1]) + 1  # without an EOS added to the one our templates write
        if length > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            raise HydrajaxError("the chat template writes BOS twice")
        return ids[:length], offsets[:length]


def make_encoder(tokenizer: Any, template: str = "auto") -> Encoder:
    """Raises `HydrajaxError` where the tokenizer cannot be used with the template."""
    source = template_source(tokenizer, template)
    added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
    pattern = "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True))
    marks = sorted({*added, *tokenizer.all_special_ids})
    return Encoder(tokenizer, source, template == "auto", re.compile(pattern or "(?!)"), np.array(marks, np.int32))


def _tiling(offsets: Int[np.ndarray, "n 2"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Offsets that leave out no character: each token starts where the one before ends.

    Byte-level tokenizers may report offsets without the spaces that a token holds, down to none for pure indentation.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    return np.concatenate([[0], ends[:-1]]), ends


def _marked_spans(tokenizer: Any, messages: list[dict], source: str) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text, and the characters that the template marks as generated.

    `apply_chat_template` would give the tokens (``return_assistant_tokens_mask``), but leaves out whole answers that
    begin with a space where offsets are without spaces.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    settings = tokenizer.special_tokens_map
    texts, spans = _attempt(
        render_jinja_template,
        conversations=[messages],
        chat_template=source,
        return_assistant_tokens_mask=True,
        **settings,
    )
    return texts[0], [(start, end) for start, end in spans[0] if end > start]


def _rendered_spans(tokenizer: Any, messages: list[dict], source: str) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text, and the characters from each generation prompt to the end of the answer's rendering."""

    def render(count: int, prompt: bool) -> str:
        return _render(tokenizer, messages[:count], source, prompt)

    text = render(len(messages), prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(index, prompt=True), render(index + 1, prompt=False)
            if not after.startswith(before):
                raise HydrajaxError(
                    f"the chat template begins message {index + 1} otherwise than its generation prompt"
                )
            if not text.startswith(after):
                raise HydrajaxError(f"the chat template writes message {index + 1} otherwise once others follow it")
            spans.append((len(before), len(after)))
    return text, spans


def _render(tokenizer: Any, messages: list[dict], source: str, prompt: bool) -> str:
    return _attempt(
        tokenizer.apply_chat_template,
        messages,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=prompt,
    )


def _attempt(render: Any, *args, **settings) -> Any:
    try:
        return render(*args, **settings)
    except Exception as error:  # a template is a program of the tokenizer's author: anything may be raised
        raise HydrajaxError(f"the chat template failed: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
