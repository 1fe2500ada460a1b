"""From a run's data settings to rows of tokens, for training and held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.train.data import conversations, corpus, encode, generations, packing
from hydrajax.train.data.packing import Document, Rows
from hydrajax.train.run_config import DataConfig


class Dataset(NamedTuple):
    """held_out is None if nothing is held out. bytes_per_token: UTF-8 bytes of held-out text per token, None if the
    documents are not plain text. held_out_names: of the files or records, in order.
    """

    train: Rows
    held_out: Rows | None
    tokenizer: Any
    bytes_per_token: float | None
    held_out_names: list[str]


class Named(NamedTuple):
    """A text or conversation before it is tokenised."""

    name: str
    content: Any


class Documents(NamedTuple):
    """Tokenised, not yet cut into rows; see `Dataset`."""

    train: list[Document]
    held_out: list[Document]
    tokenizer: Any
    bytes_per_token: float | None
    held_out_names: list[str]


def documents(config: DataConfig, tokenizer: Any | None, seed: int, say: Callable[[str], None]) -> Documents:
    """Read, split and tokenise. ``tokenizer`` None: one is trained on the training texts (`new_tokenizer`).

    ``say`` is told, a line at a time, what was read and what was left out. Raises `HydrajaxError` where nothing can be
    trained on.
    """
    train, held_out, encode_with = parts(config, seed, say)
    if tokenizer is None:
        if encode_with is not encode_text:
            raise HydrajaxError("data.new_tokenizer: can only be trained on plain text (format text, standard_library)")
        tokenizer = corpus.train_tokenizer([item.content for item in train], config.new_tokenizer)
    train_documents = encode_with(config, tokenizer, train, say)
    held_out_documents = encode_with(config, tokenizer, held_out, say)
    bytes_per_token = None
    if encode_with is encode_text and held_out_documents:
        n_bytes = sum(len(item.content.encode()) for item in held_out)
        bytes_per_token = n_bytes / sum(len(document.ids) for document in held_out_documents)
    n_tokens = sum(len(document.ids) for document in train_documents)
    say(f"data: {len(train_documents)} documents ({n_tokens:,} tokens) to train on, {len(held_out_documents)} held out")
    return Documents(train_documents, held_out_documents, tokenizer, bytes_per_token, [item.name for item in held_out])


def parts(
    config: DataConfig, seed: int, say: Callable[[str], None]
) -> tuple[list[Named], list[Named], Callable[..., list[Document]]]:
    """What is trained on and what is held out, before it is tokenised, and the function that then encodes it."""
    items, encode_with = read(config, say)
    if encode_with is encode_text and len(items) == 1:
        train, held_out = end_held_out(items[0], config.held_out)
    elif encode_with is encode_generations:
        # The answers of one conversation stand in each other's prompts, so all of them are held out or none.
        talks = list(dict.fromkeys(item.content.conversation for item in items))
        kept_back = set(packing.split(talks, config.held_out, seed)[1])
        train = [item for item in items if item.content.conversation not in kept_back]
        held_out = [item for item in items if item.content.conversation in kept_back]
    else:
        train, held_out = packing.split(items, config.held_out, seed)
    return train, held_out, encode_with


def end_held_out(text: Named, share: float) -> tuple[list[Named], list[Named]]:
    """A single text, which cannot be split by files: its end is held out, from the beginning of a line."""
    cut = len(text.content) - round(share * len(text.content))
    cut = text.content.rfind("\n", 0, cut) + 1 or cut
    parts = text.content[:cut], text.content[cut:]
    if not share or not all(part.strip() for part in parts):
        return [text], []
    return [Named(text.name, parts[0])], [Named(f"the end of {text.name}", parts[1])]


def build(config: DataConfig, tokenizer: Any | None, seed: int, say: Callable[[str], None]) -> Dataset:
    """`documents` cut into rows."""
    found = documents(config, tokenizer, seed, say)
    return Dataset(
        cut(config, found.tokenizer, found.train),
        _cut_held_out(config, found) if found.held_out else None,
        found.tokenizer,
        found.bytes_per_token,
        found.held_out_names,
    )


def _cut_held_out(config: DataConfig, found: Documents) -> Rows:
    try:
        return cut(config, found.tokenizer, found.held_out)
    except HydrajaxError as error:
        raise HydrajaxError(f"data.held_out: too little to evaluate on; raise it, or 0 for none: {error}") from None


def read(config: DataConfig, say: Callable[[str], None]) -> tuple[list[Named], Callable]:
    """The items named by the settings, and the function that encodes them."""
    if config.format == "standard_library":
        items = [Named(*file) for file in corpus.standard_library(10**12)]
        return items[: config.limit], encode_text
    if config.format == "text":
        texts, skipped = conversations.read_texts(config.files)
        say(f"data: {conversations.summary(texts, skipped, 'texts')}")
        return [Named(*text) for text in texts][: config.limit], encode_text
    if config.format == "generations":
        found = generations.read(config.files)
        return [Named(continuation.where, continuation) for continuation in found][: config.limit], encode_generations
    if config.dataset:
        found, bad = conversations.read_dataset(config.dataset, config.split, config.format)
    else:
        found, bad = conversations.read_conversations(config.files, config.format)
    say(f"data: {conversations.summary(found, bad)}")
    return [Named(conversation.where, conversation) for conversation in found][: config.limit], encode_chat


def encode_text(config: DataConfig, tokenizer: Any, items: Sequence[Named], say) -> list[Document]:
    """Every token is a target."""
    texts = [item.content for item in items]
    return [packing.all_targets(ids) for ids in tokenizer(texts)["input_ids"]] if texts else []


def encode_generations(config: DataConfig, tokenizer: Any, items: Sequence[Named], say) -> list[Document]:
    """What the base wrote is a target, the prompt is not (unless all is)."""
    vocab_size = len(tokenizer)
    documents = []
    for where, continuation in items:
        prompt, output = continuation.ids
        ids = np.asarray([*prompt, *output], np.int32)
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
            raise HydrajaxError(f"{where}: has a token id outside the tokenizer's vocabulary 0..{vocab_size - 1}")
        targets = np.arange(len(ids)) >= (0 if config.targets == "all" else len(prompt))
        documents.append(Document(ids, targets))
    return documents


def encode_chat(config: DataConfig, tokenizer: Any, items: Sequence[Named], say) -> list[Document]:
    if not items:
        return []
    documents, bad = encode.encode_conversations(tokenizer, [item.content for item in items], config.template)
    if bad:
        say(f"data: {conversations.summary(documents, bad, 'encoded')}")
    if config.targets == "all":
        documents = [packing.all_targets(document.ids) for document in documents]
    return documents


def cut(config: DataConfig, tokenizer: Any, documents: Sequence[Document]) -> Rows:
    if config.rows == "stream":
        if tokenizer.eos_token_id is None:
            raise HydrajaxError("data.rows: stream needs a tokenizer with an end-of-text token, found none")
        return packing.stream(documents, config.length, tokenizer.eos_token_id)
    return (packing.pack if config.rows == "pack" else packing.pad)(documents, config.length)
