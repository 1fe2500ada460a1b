"""Split an output into drafted and base tokens."""

from typing import Any

from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation
from hydrajax.text.tokenizer import decode_text


def text_of(result: Generation) -> str:
    """Return the output as text; its ids without a tokenizer."""
    return decode_text(None, result.output_ids) if result.text is None else result.text


def pieces(tokenizer: Any, result: Generation) -> list[tuple[str, bool]]:
    """Return the output as pieces ``(text, is_drafted)``, which join to `text_of`.

    Each step emits one token of the base and then the accepted draft tokens. A character that spans several tokens
    belongs to the token that completes it.
    """
    text, answer, ids = text_of(result), Continuation(tokenizer, result.prompt_ids), result.output_ids
    found, start, end = [], 0, 0
    for accepted in result.emitted_per_step:
        for count, is_drafted in ((1, False), (accepted - 1, True)):
            for token in ids[end : end + count]:
                answer.read(token)
            end += count
            stop = answer.offset if end < len(ids) else len(text)  # a last character may be incomplete
            if piece := text[start:stop]:
                found.append((piece, is_drafted))
            start = stop
    return found
