"""Prompts on the host: encoded and checked, padded to widths that share a compilation, filled into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.text.prompt import OnePrompt, Prompt

SMALLEST_BUCKET = 16
TokenIds = Sequence[int] | np.ndarray  # of one text


class PromptBatch(NamedTuple):
    """prompt: int32 ``[B, P]``, right-padded with 0. lengths: int32 ``[B]``. n_real: the rows that are no filling."""

    prompt: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, " B"]
    n_real: int


def bucket(length: int, max_positions: int) -> int:
    """The padded width of a prompt: the next power of two, at most the context."""
    width = max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    return max(length, min(width, max_positions))


def right_padded(rows: Sequence[TokenIds], width: int) -> tuple[Int[np.ndarray, "B width"], Int[np.ndarray, " B"]]:
    """Token ids of several lengths as one int32 array, filled up with 0, and the lengths."""
    padded = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, np.array([len(ids) for ids in rows], np.int32)


def batches(prompts: Sequence[TokenIds], size: int, width: int | None = None) -> Iterator[PromptBatch]:
    """Full batches of ``size`` prompts, in order and of one shape, so that one compilation serves all.

    width: of every batch, by default that of the longest prompt. The last batch is filled up by repeating its prompts.
    """
    width = max(map(len, prompts), default=0) if width is None else width
    for start in range(0, len(prompts), size):
        real = prompts[start : start + size]
        yield PromptBatch(*right_padded([real[i % len(real)] for i in range(size)], width), len(real))


def check_prompt(ids: np.ndarray, where: str, config: LlamaConfig) -> None:
    """Refuse an empty or overlong prompt and ids outside the vocabulary; ``where`` names the prompt in the message."""
    if ids.size == 0:
        raise HydrajaxError(f"{where}: is empty, at least one token is needed")
    if ids.size > config.max_positions:
        raise HydrajaxError(f"{where}: has {ids.size} tokens, the model's context is {config.max_positions}")
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise HydrajaxError(f"{where}: token id {outside[0]} is outside the vocabulary 0..{config.vocab_size - 1}")


def check_prompts(prompt: Int[np.ndarray, "B P"], lengths: Int[np.ndarray, "..."], config: LlamaConfig) -> None:
    """`check_prompt` of every row."""
    if lengths.shape != prompt.shape[:1]:
        raise HydrajaxError(f"lengths: must be one per prompt row, found shape {lengths.shape} for {prompt.shape}")
    for row, (ids, length) in enumerate(zip(prompt, lengths, strict=True)):
        if not 0 <= length <= len(ids):
            raise HydrajaxError(f"lengths: row {row} has length {length}, the prompt has {len(ids)} columns")
        check_prompt(ids[:length], f"prompt {row}", config)


def encode_prompt(prompt: OnePrompt, where: str, tokenizer: Any, config: LlamaConfig) -> Int[np.ndarray, " P"]:
    """Return the token ids of one prompt, int32, checked against the model.

    prompt: text, ids, the messages of a conversation, or a `Prompt`. where: names it in messages unless it brings a
    name. Raises `HydrajaxError` for a prompt that is empty, too long or not of these kinds.
    """
    if not isinstance(prompt, Prompt):
        prompt = Prompt(prompt, where)
    ids = np.asarray(prompt.ids(tokenizer), object)  # object: an id may exceed 64 bits, and is refused here
    check_prompt(ids, prompt.where, config)
    return ids.astype(np.int32)


def encode_prompts(
    prompts: Sequence[OnePrompt], tokenizer: Any, config: LlamaConfig
) -> Iterator[Int[np.ndarray, " P"]]:
    """Yield `encode_prompt` of each, named in messages by its number; one that is not asked for is not encoded."""
    if isinstance(prompts, str):
        raise HydrajaxError("prompts: must be a list of prompts, found one text; write [text]")
    for row, prompt in enumerate(prompts):
        yield encode_prompt(prompt, f"prompt {row}", tokenizer, config)
