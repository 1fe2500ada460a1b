"""The description of tools for chat templates without any."""

import json

import pytest

from helpers.json_letters import shipped_tokenizer
from hydrajax.serve.call_formats import TaggedCalls, call_format
from hydrajax.serve.default_tools import DESCRIPTION, prompt_with_tools
from hydrajax.text.templates import BUILT_IN, make_encoder

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("ab", "é")]
CALLS = [{"id": "1", "type": "function", "function": {"name": "ab", "arguments": {"a": "é"}}}]
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type": "text", "text": "Be"}]}
RESULTS = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("1", "2")]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
LISTED = DESCRIPTION.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS))
CALLED = '<tool_call>\n{"name": "ab", "arguments": {"a": "é"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TURNS + "{# system #}", [USER], f"<system>{LISTED}<user>Hi"),
        (TURNS + "{# system #}", [SYSTEM, USER], f"<system>Be\n\n{LISTED}<user>Hi"),
        (TURNS, [USER], f"<user>{LISTED}\n\nHi"),
        (NO_SYSTEM, [USER], f"<user>{LISTED}\n\nHi"),
        (
            TURNS,
            [USER, {"role": "assistant", "content": "So", "tool_calls": CALLS * 2}, *RESULTS, USER],
            f"<user>{LISTED}\n\nHi<assistant>So\n{CALLED}\n{CALLED}<user><tool_response>\n1\n</tool_response>\n"
            "<tool_response>\n2\n</tool_response>\nHi",
        ),
    ],
)
def test_prompts(template, messages, expected):
    tokenizer = shipped_tokenizer()
    tokenizer.chat_template = template
    assert prompt_with_tools(make_encoder(tokenizer), messages, TOOLS) == tokenizer.encode(expected)


@pytest.mark.parametrize("template", BUILT_IN)
def test_built_in_templates(template):
    tokenizer = shipped_tokenizer()
    encoder = make_encoder(tokenizer, template)
    text = tokenizer.decode(prompt_with_tools(encoder, [SYSTEM, USER, RESULTS[0]], TOOLS))
    assert LISTED in text
    assert "Hi" in text.partition(LISTED)[2].partition("<tool_response>")[0]
    form = call_format(encoder.source_for([{}]), tokenizer)
    assert isinstance(form, TaggedCalls)
    assert form.read(CALLED, True).calls[0].arguments == '{"a": "é"}'
