"""Tokenise conversations and find the tokens that the assistant generates, which are the targets."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.text.templates import PromptEncoder, make_encoder, readable_messages, run_template
from hydrajax.train.data.conversations import BadRecord, Conversation
from hydrajax.train.data.packing import Document

Spans = list[tuple[int, int]]  # first character and end of each answer in the rendered text

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def encode_conversations(
    tokenizer: Any, conversations: Sequence[Conversation], template: str = "auto"
) -> tuple[list[Document], list[BadRecord]]:
    """Tokenise each conversation as a whole, and return those that failed too.

    The targets are the tokens that the model generates: from the generation prompt to the special token that ends the
    turn. If the template marks them with ``{% generation %}``, the marks are used. Otherwise the conversation is
    rendered up to each answer and up to its end, and each text must be a prefix of the next.

    Args:
        template: ``auto`` for the tokenizer's own, or one of `hydrajax.text.templates.BUILT_IN`.

    Raises:
        HydrajaxError: all conversations fail (the template fails, changes an answer, or a message contains the text of
            a special token), or tokenizer and template do not fit.
    """
    encoder = make_encoder(tokenizer, template, field="data.template", tokenizer_field="data.tokenizer")
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


def _document(encoder: PromptEncoder, conversation: Conversation) -> Document:
    for number, message in enumerate(conversation.messages, start=1):
        if found := encoder.special.search(message.content):
            raise HydrajaxError(f"message {number} contains the special token {found[0]}")
    answers = [message.content.strip() for message in conversation.messages if message.role == "assistant"]
    messages = [message._asdict() for message in conversation.messages]
    text, spans = (_marked_spans if _GENERATION.search(encoder.source) else _rendered_spans)(encoder, messages)
    if len(spans) != len(answers):
        raise HydrajaxError(f"the chat template marks {len(spans)} answers, expected {len(answers)}")
    ids, offsets = encoder.tokenize(text)
    starts, ends = _tiling(offsets)
    targets = np.zeros(len(ids), bool)
    for (start, end), answer in zip(spans, answers, strict=True):
        at = text.rfind(answer, start, end)
        if at < 0:
            raise HydrajaxError(f"the chat template changes the answer {answer[:40]!r}")
        first, last = np.flatnonzero((starts < end) & (ends > start))[[0, -1]]
        last = max(last, int(np.searchsorted(ends, end, side="right")) - 1)  # more bytes of the last character
        # A token across the edge is a target if it covers only spaces outside the span.
        first += bool(text[starts[first] : start].strip())
        last -= bool(text[end : ends[last]].strip())
        after = int(np.searchsorted(starts, at + len(answer)))  # the first token after the answer
        # An end mark directly after {% generation %} is a target too, unless it is the next BOS.
        limit = last + 1 + (last + 1 < len(ids) and ids[last + 1] != encoder.tokenizer.bos_token_id)
        marks = np.flatnonzero(np.isin(ids[after:limit], encoder.marks))
        if len(marks):  # the template writes what follows the mark, such as a newline
            targets[first : after + marks[0] + 1] = True
        else:
            text_end = start + len(text[start:end].rstrip())
            targets[first : last + 1] = starts[first : last + 1] < text_end
    # A token without characters is another byte of the character before it.
    for index in np.flatnonzero(starts == ends):
        targets[index] = index > 0 and targets[index - 1]
    return Document(ids, targets)


def _tiling(offsets: Int[np.ndarray, "n 2"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Starts and ends of the tokens such that each starts where the previous one ends.

    Byte-level tokenizers may report offsets without a token's spaces.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    return np.concatenate([[0], ends[:-1]]), ends


def _marked_spans(encoder: PromptEncoder, messages: list[dict]) -> tuple[str, Spans]:
    """The rendered text and the spans that the template marks as generated.

    `apply_chat_template` with ``return_assistant_tokens_mask`` would give the tokens, but omits answers that begin with
    a space if offsets are without spaces.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: list[dict]) -> tuple[list[str], list[Spans]]:
        return run_template(
            render_jinja_template,
            conversations=[messages],
            chat_template=encoder.source,
            return_assistant_tokens_mask=True,
            **encoder.tokenizer.special_tokens_map,
        )

    texts, spans = render(readable_messages(lambda marked: render(marked)[0][0], messages))
    return texts[0], [(start, end) for start, end in spans[0] if end > start]


def _rendered_spans(encoder: PromptEncoder, messages: list[dict]) -> tuple[str, Spans]:
    """The rendered text and the spans from each generation prompt to the end of its answer."""
    text = encoder.render(messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = encoder.render(messages[:index], prompt=True)
            after = encoder.render(messages[: index + 1], prompt=False)
            if not after.startswith(before):
                raise HydrajaxError(f"the chat template begins message {index + 1} unlike its generation prompt")
            if not text.startswith(after):
                raise HydrajaxError(f"the chat template changes message {index + 1} once others follow it")
            spans.append((len(before), len(after)))
    return text, spans
