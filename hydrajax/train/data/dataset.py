"""Read, split, tokenise and pack the data of a run."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import read_jsonl
from hydrajax.text.records import Kind, checked
from hydrajax.train.data import conversations, corpus, encode, packing
from hydrajax.train.data.packing import Document, Rows
from hydrajax.train.run_config import DataConfig

Log = Callable[[str], None]


class Dataset(NamedTuple):
    """Training and held-out sequences.

    Attributes:
        train, held_out: ``held_out`` is None if nothing is held out.
        tokenizer: of the data, trained on it if ``data.new_tokenizer`` is set.
        bytes_per_token: UTF-8 bytes of held-out text per token, None if the documents are not plain text.
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
    """A `Dataset` before it is cut into sequences."""

    train: list[Document]
    held_out: list[Document]
    tokenizer: Any
    bytes_per_token: float | None
    held_out_names: list[str]


def build(config: DataConfig, tokenizer: Any | None, seed: int, log: Log) -> Dataset:
    """Return `documents` cut into sequences; raise as it does."""
    found = documents(config, tokenizer, seed, log)
    train, held_out = cut(config, found.tokenizer, found.train), None
    if found.held_out:
        try:
            held_out = cut(config, found.tokenizer, found.held_out)
        except HydrajaxError as error:
            raise HydrajaxError(f"data.held_out: too little to evaluate on; raise it, or 0 for none: {error}") from None
    return Dataset(train, held_out, *found[2:])


def documents(config: DataConfig, tokenizer: Any | None, seed: int, log: Log) -> Documents:
    """Read, split and tokenise the data.

    Args:
        tokenizer: None trains one on the training texts (`DataConfig.new_tokenizer`).

    Raises:
        HydrajaxError: the data cannot be read or has nothing to train on.
    """
    train, held_out, encode_with = parts(config, seed, log)
    is_text = encode_with is encode_text
    if tokenizer is None:
        if not is_text:
            raise HydrajaxError("data.new_tokenizer: needs plain text, data.format text or standard_library")
        tokenizer = corpus.train_tokenizer([item.content for item in train], config.new_tokenizer)
    encoded, encoded_held_out = (encode_with(config, tokenizer, items, log) for items in (train, held_out))
    bytes_per_token = None
    if is_text and encoded_held_out:
        bytes_per_token = sum(len(item.content.encode()) for item in held_out) / _n_tokens(encoded_held_out)
    log(f"data: {len(encoded)} documents ({_n_tokens(encoded):,} tokens) to train on, {len(encoded_held_out)} held out")
    return Documents(encoded, encoded_held_out, tokenizer, bytes_per_token, [item.name for item in held_out])


def _n_tokens(found: Sequence[Document]) -> int:
    return sum(len(document.ids) for document in found)


def parts(config: DataConfig, seed: int, log: Log) -> tuple[list[Named], list[Named], Callable[..., list[Document]]]:
    """Return training and held-out items before they are tokenised, and the function that encodes them."""
    items, encode_with = read(config, log)
    if encode_with is encode_text and len(items) == 1:
        return *end_held_out(items[0], config.held_out), encode_with
    if encode_with is encode_generations:
        # The answers of one conversation are in each other's prompts, so all are held out or none.
        dialogues = list(dict.fromkeys(item.content.conversation for item in items))
        chosen = set(packing.split(dialogues, config.held_out, seed)[1])
        train = [item for item in items if item.content.conversation not in chosen]
        return train, [item for item in items if item.content.conversation in chosen], encode_with
    return *packing.split(items, config.held_out, seed), encode_with


def end_held_out(text: Named, fraction: float) -> tuple[list[Named], list[Named]]:
    """Hold out the end of a single text, from the beginning of a line."""
    end = len(text.content) - round(fraction * len(text.content))
    end = text.content.rfind("\n", 0, end) + 1 or end
    first, last = text.content[:end], text.content[end:]
    if not fraction or not first.strip() or not last.strip():
        return [text], []
    return [Named(text.name, first)], [Named(f"the end of {text.name}", last)]


def read(config: DataConfig, log: Log) -> tuple[list[Named], Callable]:
    """Return the items that the settings name, and the function that encodes them."""
    if config.format == "standard_library":
        found, encode_with = corpus.standard_library(10**12), encode_text
    elif config.format == "text":
        found, skipped = conversations.read_texts(config.files)
        log(f"data: {conversations.summary(found, skipped, 'texts')}")
        encode_with = encode_text
    elif config.format == "generations":
        found = [(continuation.where, continuation) for continuation in read_generations(config.files)]
        encode_with = encode_generations
    else:
        if config.dataset:
            chats, bad = conversations.read_dataset(config.dataset, config.split, config.format)
        else:
            chats, bad = conversations.read_conversations(config.files, config.format)
        log(f"data: {conversations.summary(chats, bad)}")
        found, encode_with = [(chat.where, chat) for chat in chats], encode_chat
    return [Named(*item) for item in found[: config.limit]], encode_with


IDS = Kind(
    "a list of token ids",
    lambda ids: isinstance(ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in ids),
)


class Continuation(NamedTuple):
    """A prompt and the text that the base has generated after it.

    Attributes:
        where: file and line, such as ``"out.jsonl line 3"``.
        ids: ``(prompt ids, generated ids)``.
        conversation: equal for all answers of one conversation, whose prompts contain each other.
    """

    where: str
    ids: tuple[list[int], list[int]]
    conversation: tuple[str, int | str]


def read_generations(files: Iterable[str | Path]) -> list[Continuation]:
    """Read JSONL lines with ``prompt_ids`` and ``output_ids``; other fields are ignored."""
    found = []
    for file in files:
        for where, line in read_jsonl(file, "data.files"):
            number = line.get("conversation")  # in files of `hydrajax distill`; other lines are separate conversations
            conversation = str(file), number if type(number) is int else where
            checked(line, {"prompt_ids": IDS, "output_ids": IDS}, where)
            found.append(Continuation(where, (line["prompt_ids"], line["output_ids"]), conversation))
    if not found:
        raise HydrajaxError(f"data.files: no generation in {', '.join(map(str, files))}")
    return found


def encode_text(config: DataConfig, tokenizer: Any, items: Sequence[Named], log: Log) -> list[Document]:
    """Tokenise texts; every token is a target."""
    texts = [item.content for item in items]
    return [packing.all_targets(ids) for ids in tokenizer(texts)["input_ids"]] if texts else []


def encode_generations(config: DataConfig, tokenizer: Any, items: Sequence[Named], log: Log) -> list[Document]:
    """Return prompts and continuations. The continuation is the target, or everything with ``targets: all``."""
    vocab_size = len(tokenizer)
    found = []
    for where, continuation in items:
        prompt, output = continuation.ids
        ids = np.asarray([*prompt, *output], np.int32)
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
            raise HydrajaxError(f"{where}: has a token id outside the tokenizer's vocabulary 0..{vocab_size - 1}")
        targets = np.arange(len(ids)) >= (0 if config.targets == "all" else len(prompt))
        found.append(Document(ids, targets))
    return found


def encode_chat(config: DataConfig, tokenizer: Any, items: Sequence[Named], log: Log) -> list[Document]:
    """Tokenise conversations; the assistant's tokens are targets, or all with ``targets: all``."""
    if not items:
        return []
    found, bad = encode.encode_conversations(tokenizer, [item.content for item in items], config.template)
    if bad:
        log(f"data: {conversations.summary(found, bad, 'encoded')}")
    if config.targets == "all":
        found = [packing.all_targets(document.ids) for document in found]
    return found


def cut(config: DataConfig, tokenizer: Any, found: Sequence[Document]) -> Rows:
    """Cut documents into sequences as ``data.rows`` describes."""
    if config.rows == "stream":
        if tokenizer.eos_token_id is None:
            raise HydrajaxError("data.rows: stream needs a tokenizer with an end-of-text token, found none")
        return packing.stream(found, config.length, tokenizer.eos_token_id)
    return (packing.pack if config.rows == "pack" else packing.pad)(found, config.length)
