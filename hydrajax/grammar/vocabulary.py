"""A base's vocabulary as llguidance reads it: the bytes of every token."""

from __future__ import annotations

import functools
from typing import Any

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.optional_deps import needs


@functools.lru_cache(maxsize=4)  # half a second for 49,152 tokens
def vocabulary_of(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """Return the `llguidance.LLTokenizer` of a transformers tokenizer.

    Args:
        tokenizer: the base's; a fast one, whose Rust implementation llguidance reads.
        vocab_size: the base's. Ids beyond the tokenizer's are never allowed.
        eos_ids: the tokens that may follow a complete text.

    Raises:
        HydrajaxError: if llguidance is missing, and for a base without a fast tokenizer or without EOS.
    """
    try:
        import llguidance.hf
    except ImportError:
        raise HydrajaxError(f"grammar: {needs('llguidance')}") from None
    if tokenizer is None:
        raise HydrajaxError("grammar: requires a tokenizer, which the base does not have")
    if not eos_ids:
        raise HydrajaxError("grammar: requires an end-of-sequence token, which the base does not have")
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
    except Exception as error:  # of several kinds
        raise HydrajaxError(f"grammar: the base's tokenizer cannot be used ({one_line(error, 120)})") from None
