"""A tokenizer of seventeen tokens that can write JSON and tool calls, for the base of `helpers.letters`."""

import numpy as np

from helpers.letters import END
from hydrajax import assets
from hydrajax.decoding.constraints import WORD, allowed_next
from hydrajax.text.tokenizer import load_tokenizer

PIECES = ["{", "}", '"', ":", ",", "Ġ", "Ċ", "a", "b", "0", "1"]  # Ġ and Ċ are a space and a line break
TAG, END_TAG = "<tool_call>", "</tool_call>"
ADDED = [TAG, END_TAG, "name", "arguments", "parameters"]
IDS = {token: number for number, token in enumerate([*PIECES, *ADDED])}
assert len(IDS) == END

# As Qwen 2.5's, shortened. Other letters than these tokens' are left out of prompts.
HERMES = """{% if tools %}<tool_call>{"name": , "arguments": }</tool_call>\
{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}\
{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.role == 'tool' %} {{ m.tool_call_id }}{% endif %}
{% endfor %}"""
# As Llama 3.1's, shortened.
LLAMA = """{% if tools %}{"name": function name, "parameters": dictionary}\
{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}{% for m in messages %}{{ m.content }}
{% endfor %}"""

# Schemas of functions' arguments, by name.
LETTERS = {"type": "object", "properties": {"a": {"enum": ["ab", "ba", "a"]}}, "required": ["a"]}
NUMBER = {"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "required": ["b"]}
NUMBER |= {"$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 11}}}
SCHEMAS = {"ab": LETTERS | {"additionalProperties": False}, "a": NUMBER | {"additionalProperties": False}}
SCHEMAS |= {"b": {"type": "object", "additionalProperties": False}}  # of a function without parameters
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "b", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
del TOOLS[2]["function"]["parameters"]


def tokenizer():
    """Return a byte-level tokenizer. As in Qwen's, the tags are tokens that are not special; ``</s>`` is EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE(vocab={piece: IDS[piece] for piece in PIECES}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokens.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>", chat_template=HERMES)


def shipped_tokenizer(*added: str, special: bool = False):
    """Return the shipped base's tokenizer with further tokens."""
    from tokenizers import AddedToken

    found = load_tokenizer(assets.base())
    found.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    return found


def accepts(tokenizer, grammar, text: str, eos_ids: tuple[int, ...] = ()) -> bool:
    """Return whether a grammar accepts a text as the tokenizer writes it, and then EOS."""
    eos_ids = eos_ids or (tokenizer.eos_token_id,)
    matcher = grammar.start(tokenizer, len(tokenizer), eos_ids)
    matcher.follow(tokenizer(text, add_special_tokens=False)["input_ids"])
    if matcher.error is not None:
        return False
    word, bit = divmod(eos_ids[0], WORD)
    return bool(allowed_next(matcher, len(tokenizer))[0, word] >> np.uint32(bit) & 1)
