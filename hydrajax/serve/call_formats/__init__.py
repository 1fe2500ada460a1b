"""Formats in which models write tool calls, by name."""

import re
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.serve.call_formats.plain import PlainCalls
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import CallFormat


def call_format(template: str, tokenizer: Any) -> CallFormat:
    """Return the format of calls that a chat template describes.

    Args:
        template: Jinja text.
        tokenizer: of transformers.

    Raises:
        HydrajaxError: for an unknown format, and for tags that decoding leaves out.
    """
    # llguidance regards added tokens of this form as special, so that no text contains them.
    added = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if re.fullmatch("<.+>", token.content) and (not token.special or token.content == PlainCalls.MARK)
    }
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if TaggedCalls.TAG in template and not re.search("<function=|<arg_key>", template):
        if found := special & {TaggedCalls.TAG, TaggedCalls.END}:
            raise HydrajaxError(f"tools: {min(found)} is a special token of the base, expected one that stays in texts")
        return TaggedCalls(added)
    if re.search(r'"name\\?": [^,{}]+, \\?"parameters\\?":', template):
        return PlainCalls(added)
    raise HydrajaxError(
        "tools: the chat template describes calls in an unknown format, expected <tool_call> with JSON (Hermes, Qwen) "
        'or {"name": ..., "parameters": ...} (Llama 3)'
    )
