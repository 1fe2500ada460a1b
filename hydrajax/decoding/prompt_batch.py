"""Prompts on the host: encode and check them, pad them to shared widths, and combine them into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.text.prompt import OnePrompt, Prompt, items

SMALLEST_BUCKET = 16
TokenIds = Sequence[int] | np.ndarray  # of one text


class PromptBatch(NamedTuple):
    """A batch of prompts.

    Attributes:
        prompt: int32 ``[B, P]``, right-padded with 0.
        lengths: int32 ``[B]``.
        n_real: Number of prompts; the rest of the batch repeats them.
    """

    prompt: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, " B"]
    n_real: int


def bucket(length: int, max_positions: int) -> int:
    """Return the padded width of a prompt: the next power of two, or 3/4 of it from 96 on, at most the context.

    A wider prompt takes longer to prefill, and more widths mean more programs to compile.
    """
    width = max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    if width >= 128 and length <= width // 4 * 3:
        width = width // 4 * 3
    return max(length, min(width, max_positions))


def right_padded(rows: Sequence[TokenIds], width: int) -> tuple[Int[np.ndarray, "B width"], Int[np.ndarray, " B"]]:
    """Return token ids of several lengths as one int32 array padded with 0, and the lengths."""
    padded = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, np.array([len(ids) for ids in rows], np.int32)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def batches(prompts: Sequence[TokenIds], size: int) -> Iterator[PromptBatch]:
    """Yield full batches of ``size`` prompts, in order and of one shape, so that one compilation serves all.

    Args:
        prompts: Token ids.
        size: Prompts per batch; the last batch repeats its prompts to fill up.
    """
    width = max(map(len, prompts), default=0)
    for start in range(0, len(prompts), size):
        real = prompts[start : start + size]
        yield PromptBatch(*right_padded([real[i % len(real)] for i in range(size)], width), len(real))


def check_prompt(ids: np.ndarray, where: str, config: LlamaConfig) -> None:
    """Check one prompt; ``where`` names it in messages.

    Raises:
        HydrajaxError: For an empty or overlong prompt, and for ids outside the vocabulary.
    """
    if ids.size == 0:
        raise HydrajaxError(f"{where}: got no tokens, expected at least one")
    if ids.size > config.max_positions:
        raise HydrajaxError(
            f"{where}: got {ids.size} tokens, expected at most the model's context of {config.max_positions}"
        )
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise HydrajaxError(f"{where}: got token id {outside[0]}, expected 0 to {config.vocab_size - 1}")


def check_prompts(prompt: Int[np.ndarray, "B P"], lengths: Int[np.ndarray, "..."], config: LlamaConfig) -> None:
    """Apply `check_prompt` to every prompt."""
    for row, (ids, length) in enumerate(zip(prompt, lengths, strict=True)):
        if not 0 <= length <= len(ids):
            raise HydrajaxError(f"lengths: got {length} for prompt {row}, expected 0 to its {len(ids)} columns")
        check_prompt(ids[:length], f"prompt {row}", config)


def encode_prompt(prompt: OnePrompt, where: str, tokenizer: Any, config: LlamaConfig) -> Int[np.ndarray, " P"]:
    """Return the token ids of one prompt, int32, checked against the model.

    Args:
        prompt: Text, ids, the messages of a conversation, or a `Prompt`.
        where: Names it in messages, unless the prompt has a name.
        tokenizer: The base's.
        config: The base's.

    Raises:
        HydrajaxError: For a prompt that is empty, too long or of another kind.
    """
    if not isinstance(prompt, Prompt):
        prompt = Prompt(prompt, where)
    ids = np.asarray(prompt.ids(tokenizer), object)  # object: an id may exceed 64 bits, and is refused here
    check_prompt(ids, prompt.where, config)
    return ids.astype(np.int32)


def encode_prompts(
    prompts: Sequence[OnePrompt], tokenizer: Any, config: LlamaConfig
) -> Iterator[Int[np.ndarray, " P"]]:
    """Yield `encode_prompt` of each, lazily; messages name a prompt by its number."""
    if isinstance(prompts, str):
        raise HydrajaxError("prompts: got one text, expected a list: write [text]")
    for row, prompt in enumerate(items(prompts, "prompts", "a list of prompts")):
        yield encode_prompt(prompt, f"prompt {row}", tokenizer, config)
