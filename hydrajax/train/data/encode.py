"""Conversations to training documents: token ids, and which of the tokens the assistant has to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.text.templates import Encoder, make_encoder, run_template
from hydrajax.train.data.conversations import BadRecord, Conversation
from hydrajax.train.data.packing import Document

Spans = list[tuple[int, int]]  # first character and end of each answer in a rendered text

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_conversation(tokenizer: Any, conversation: Conversation, template: str = "auto") -> Document:
    """The whole conversation in one tokenisation; targets are what the assistant says and the mark that ends it.

    tokenizer: a fast one of transformers. template: ``auto`` for the tokenizer's own, or one of
    `hydrajax.text.templates.BUILT_IN`. A target is every token that the model itself would have to write: all that
    follows the generation prompt, up to and including the special token that ends the turn. Where the template marks
    this by ``{% generation %}``, that is used; otherwise the conversation is rendered up to each answer and up to its
    end, and each text must begin the next.

    Raises `HydrajaxError` naming the conversation where the template refuses it, where its answers cannot be found
    again in the text, and where a message holds a special token's text, which would become that token; and, naming
    the setting, where tokenizer and template do not go together at all.
    """
    encoder = _encoder(tokenizer, template)
    try:
        return _document(encoder, conversation)
    except HydrajaxError as error:
        raise HydrajaxError(f"{conversation.where}: {error}") from None


def encode_conversations(
    tokenizer: Any, conversations: Sequence[Conversation], template: str = "auto"
) -> tuple[list[Document], list[BadRecord]]:
    """`encode_conversation` of each, and those that it refuses. Raises `HydrajaxError` where it refuses all."""
    encoder = _encoder(tokenizer, template)
    documents, bad = [], []
    for conversation in conversations:
        try:
            documents.append(_document(encoder, conversation))
        except HydrajaxError as error:
            bad.append(BadRecord(conversation.where, str(error)))
    if not documents:
        first = f"; the first: {bad[0].where}: {bad[0].reason}" if bad else ""
        raise HydrajaxError(f"data.template: none of {len(bad)} conversations can be encoded{first}")
    return documents, bad


def _encoder(tokenizer: Any, template: str) -> Encoder:
    return make_encoder(tokenizer, template, field="data.template", tokenizer_field="data.tokenizer")


def _document(encoder: Encoder, conversation: Conversation) -> Document:
    """As `encode_conversation`, whose errors have the conversation's place besides."""
    for number, message in enumerate(conversation.messages, start=1):
        if found := encoder.special.search(message.content):
            raise HydrajaxError(f"message {number} holds the text of the special token {found[0]}")
    answers = [message.content.strip() for message in conversation.messages if message.role == "assistant"]
    messages = [message._asdict() for message in conversation.messages]
    text, spans = (_marked_spans if _GENERATION.search(encoder.source) else _rendered_spans)(encoder, messages)
    if len(spans) != len(answers):
        raise HydrajaxError(f"the chat template marks {len(spans)} answers of the {len(answers)} there are")
    ids, offsets = encoder.tokenize(text)
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
        limit = last + 1 + (last + 1 < len(ids) and ids[last + 1] != encoder.tokenizer.bos_token_id)
        marks = np.flatnonzero(np.isin(ids[behind:limit], encoder.marks))
        if len(marks):  # what follows the mark, such as a newline, is the template's
            targets[first : behind + marks[0] + 1] = True
        else:
            said = start + len(text[start:end].rstrip())
            targets[first : last + 1] = starts[first : last + 1] < said
    # A token without characters of its own is a further byte of the character before it.
    for index in np.flatnonzero(starts == ends):
        targets[index] = index > 0 and targets[index - 1]
    return Document(ids, targets)


def _tiling(offsets: Int[np.ndarray, "n 2"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Where tokens start and end, with no character left out: each token starts where the one before ends.

    Byte-level tokenizers may report offsets without the spaces that a token holds, down to none for pure indentation.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    return np.concatenate([[0], ends[:-1]]), ends


def _marked_spans(encoder: Encoder, messages: list[dict]) -> tuple[str, Spans]:
    """The rendered text, and the characters that the template marks as generated.

    `apply_chat_template` would give the tokens (``return_assistant_tokens_mask``), but leaves out whole answers that
    begin with a space where offsets are without spaces.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = run_template(
        render_jinja_template,
        conversations=[messages],
        chat_template=encoder.source,
        return_assistant_tokens_mask=True,
        **encoder.tokenizer.special_tokens_map,
    )
    return texts[0], [(start, end) for start, end in spans[0] if end > start]


def _rendered_spans(encoder: Encoder, messages: list[dict]) -> tuple[str, Spans]:
    """The rendered text, and the characters from each generation prompt to the end of the answer's rendering."""
    text = encoder.render(messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = encoder.render(messages[:index], prompt=True)
            after = encoder.render(messages[: index + 1], prompt=False)
            if not after.startswith(before):
                raise HydrajaxError(
                    f"the chat template begins message {index + 1} otherwise than its generation prompt"
                )
            if not text.startswith(after):
                raise HydrajaxError(f"the chat template writes message {index + 1} otherwise once others follow it")
            spans.append((len(before), len(after)))
    return text, spans
