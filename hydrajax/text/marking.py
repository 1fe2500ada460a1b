"""Split an output into drafted and base tokens."""

from __future__ import annotations

from typing import Any

from hydrajax.text.answers import Generation
from hydrajax.text.stopping import INCOMPLETE
from hydrajax.text.tokenizer import decode_text


def text_of(result: Generation) -> str:
    """Return the output as text; its ids without a tokenizer."""
    return " ".join(map(str, result.output_ids)) if result.text is None else result.text


def pieces(tokenizer: Any, result: Generation) -> list[tuple[str, bool]]:
    """Return the output as pieces ``(text, is_drafted)``, which join to `text_of`.

    Each step emits one token of the base and then the accepted draft tokens. A character that spans several tokens
    belongs to the token that completes it.
    """
    text, cuts, end = text_of(result), [], 0
    for accepted in result.emitted_per_step:
        for count, is_drafted in ((1, False), (accepted - 1, True)):
            end += count
            cuts.append((end, is_drafted))
    found, start = [], 0
    for end, is_drafted in cuts:
        if end == len(result.output_ids):
            stop = len(text)
        elif tokenizer is None:
            stop = len(" ".join(map(str, result.output_ids[:end]))) + 1
        else:
            so_far = decode_text(tokenizer, result.output_ids[:end])
            if not text.startswith(so_far):
                so_far = so_far.rstrip(INCOMPLETE)
            stop = max(start, len(so_far)) if text.startswith(so_far) else start
        if stop > start:
            found.append((text[start:stop], is_drafted))
        start = stop
    return found
