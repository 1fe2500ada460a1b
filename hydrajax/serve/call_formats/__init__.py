"""Formats in which models write tool calls, by the names of vLLM's parsers."""

import re
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.serve.call_formats.gemma import FunctionGemmaCalls, GemmaCalls
from hydrajax.serve.call_formats.mistral import MistralCalls
from hydrajax.serve.call_formats.plain import PlainCalls
from hydrajax.serve.call_formats.pythonic import PythonicCalls
from hydrajax.serve.call_formats.qwen_coder import QwenCoderCalls
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.tool_calls import CallFormat

# Each format, and what a chat template contains that describes it; the first that fits is taken.
FORMATS: dict[str, tuple[Any, str]] = {
    "hermes": (TaggedCalls, r"\A(?!.*(<function=|<arg_key>)).*<tool_call>"),
    "qwen3_coder": (QwenCoderCalls, r"<function=.*<parameter="),
    "mistral": (MistralCalls, r"\[TOOL_CALLS\]"),
    "gemma4": (GemmaCalls, r"<\|tool_call>call:"),
    "functiongemma": (FunctionGemmaCalls, r"<start_function_call>call:"),
    "llama3_json": (PlainCalls, r'"name\\?": [^,{}]+, \\?"parameters\\?":'),
    "llama4_pythonic": (PythonicCalls, r"\[func_name1\("),
}
ALIASES = {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "pythonic": "llama4_pythonic"}
NAMES = (*FORMATS, *ALIASES, "openai")


def call_format(template: str, tokenizer: Any, name: str = "auto", forced: bool = False) -> CallFormat:
    """Return the format of calls with this name, by default the one that a chat template describes.

    Args:
        template: Jinja text. Without tools it describes none, and our own description has the format of Hermes.
        tokenizer: of transformers.
        name: one of `NAMES`, or ``auto``.
        forced: answers are nothing but calls, so that any format serves.

    Raises:
        HydrajaxError: for an unknown format, and for ``openai`` with another base than gpt-oss.
    """
    if name == "openai":
        raise HydrajaxError("tool_parser: got openai, expected a base with harmony's channels and tokens (gpt-oss)")
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    fitting = (one for one, (_, described) in FORMATS.items() if re.search(described, template, re.DOTALL))
    found = next(fitting, None) if name == "auto" else ALIASES.get(name, name)
    if found is None and (forced or "tools" not in template):
        found = "hermes"
    if found is None:
        raise HydrajaxError(
            "tools: the chat template describes calls in an unknown format; start the server with --tool-parser, one "
            f"of {', '.join(FORMATS)}, or set tool_choice to required"
        )
    return FORMATS[found][0](separate_tokens(tokenizer), special)


def separate_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of added tokens that no text of a grammar contains: special ones, and those like ``<think>``."""
    added = tokenizer.added_tokens_decoder.items()
    return {x.content: i for i, x in added if x.special or re.fullmatch("<.+>", x.content)}
