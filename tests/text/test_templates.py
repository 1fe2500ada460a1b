"""Chat templates for decoding: what opens an answer, and tokenizers that a template cannot be used with."""

from __future__ import annotations

import copy
import json

import pytest

from hydrajax import assets
from hydrajax.errors import HydrajaxError
from hydrajax.text.templates import BUILT_IN, VICUNA_SYSTEM, make_encoder
from hydrajax.train.data.corpus import END_OF_TEXT, train_tokenizer

MESSAGES = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
]
OWN = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain_tokenizer():
    return train_tokenizer(["USER: ASSISTANT: a chat"], 260)


@pytest.fixture
def tokenizer(plain_tokenizer):
    return copy.deepcopy(plain_tokenizer)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("auto", "user:qassistant:auser:r>"),
        ("plain", f"q\na{END_OF_TEXT}r\n"),
        ("raw", f"qa{END_OF_TEXT}r"),
        ("vicuna", f"{VICUNA_SYSTEM} USER: q ASSISTANT: a{END_OF_TEXT}USER: r ASSISTANT:"),
    ],
)
def test_prompts_end_where_the_answer_begins(tokenizer, template, text):
    tokenizer.chat_template = OWN
    encoder = make_encoder(tokenizer, template)
    assert encoder.render(MESSAGES, prompt=True) == text
    assert encoder.prompt(MESSAGES) == tokenizer.encode(text)


def test_a_raw_prompt_ends_in_its_last_word(tokenizer):
    text = "def f():\n    pass"
    assert make_encoder(tokenizer, "raw").prompt([{"role": "user", "content": f"{text}\n\n"}]) == tokenizer.encode(text)


def test_special_tokens_are_found_in_text(tokenizer):
    encoder = make_encoder(tokenizer, "plain")
    assert encoder.special.search(f"say {END_OF_TEXT}!")[0] == END_OF_TEXT
    assert encoder.special.search("say </s>") is None


def test_the_shipped_base_chats_in_the_raw_template():
    config = json.loads((assets.base() / "tokenizer_config.json").read_text())
    assert config["chat_template"] == BUILT_IN["raw"]


class SlowTokenizer:
    is_fast = False


@pytest.mark.parametrize(
    ("changes", "template", "message"),
    [
        ({}, "auto", "template: the tokenizer has no chat template; .*--template plain"),
        ({}, "alpaca", "template: got 'alpaca', expected auto, vicuna, plain"),
        ({"chat_template": {"tool_use": OWN}}, "auto", "template: .*multiple chat templates with no default"),
        (
            {"eos_token": None},
            "vicuna",
            "template: vicuna ends answers with EOS, but the tokenizer has no EOS token",
        ),
    ],
)
def test_settings_that_do_not_go_together(tokenizer, changes, template, message):
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    with pytest.raises(HydrajaxError, match=f"^{message}"):
        make_encoder(tokenizer, template)


def test_messages_name_the_fields_of_the_caller(tokenizer):
    with pytest.raises(HydrajaxError, match=r"^base: got SlowTokenizer, expected a fast tokenizer"):
        make_encoder(SlowTokenizer(), "plain")
    with pytest.raises(HydrajaxError, match=r"^model: got SlowTokenizer, expected a fast tokenizer"):
        make_encoder(SlowTokenizer(), "plain", tokenizer_field="model")
    with pytest.raises(HydrajaxError, match=r"^style: got 'x'"):
        make_encoder(tokenizer, "x", field="style")


def test_a_template_that_fails_is_one_line(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no\nway') }}"
    with pytest.raises(HydrajaxError, match=r"^the chat template failed: no way$"):
        make_encoder(tokenizer).prompt(MESSAGES)
