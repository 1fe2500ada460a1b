"""Chat templates for decoding: what opens an answer, and tokenizers that a template cannot be used with."""

import copy
import json

import pytest

from hydrajax import assets
from hydrajax.errors import HydrajaxError
from hydrajax.text.prompt import Prompt
from hydrajax.text.templates import BUILT_IN, VICUNA_SYSTEM, make_encoder
from hydrajax.train.data.corpus import END_OF_TEXT, train_tokenizer

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
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


def test_settings_that_do_not_go_together(tokenizer, plain_tokenizer):
    for changes, template, message in (
        ({}, "auto", "template: the tokenizer has no chat template; .*--template plain"),
        ({}, "alpaca", "template: got 'alpaca', expected auto, vicuna, plain, raw or a file in Jinja"),
        ({"chat_template": {"tool_use": OWN}}, "auto", "template: .*multiple chat templates with no default"),
        ({"eos_token": None}, "vicuna", "template: vicuna ends answers with EOS, but the tokenizer has no EOS token"),
    ):
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        with pytest.raises(HydrajaxError, match=f"^{message}"):
            make_encoder(tokenizer, template)
    for field in ("base", "model"):
        with pytest.raises(HydrajaxError, match=rf"^{field}: got SlowTokenizer, expected a fast tokenizer"):
            make_encoder(SlowTokenizer(), "plain", **({} if field == "base" else {"tokenizer_field": field}))
    with pytest.raises(HydrajaxError, match=r"^style: got 'x'"):
        make_encoder(plain_tokenizer, "x", field="style")


def test_a_template_in_a_file(tokenizer, plain_tokenizer, tmp_path):
    """It is used as the tokenizer's own is, which stays as it was."""
    file = tmp_path / "chat.jinja"
    file.write_text(OWN, "utf-8")
    before, tokenizer.chat_template = plain_tokenizer.chat_template, OWN
    assert make_encoder(plain_tokenizer, str(file)).prompt(MESSAGES) == make_encoder(tokenizer).prompt(MESSAGES)
    assert plain_tokenizer.chat_template == before
    for content, message in (
        (b"a\n{% for m in messages %}", r"style: .*chat.jinja, line 2: Unexpected end of template"),
        (b" \n", r"style: .*chat.jinja is empty, expected a chat template in Jinja"),
        (b"\xff", r"style: .*chat.jinja cannot be read as text"),
        (
            b"{{ messages.__class__.__base__ }}",
            "the chat template failed: access to attribute '__class__' .* is unsafe",
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(HydrajaxError, match=message) as caught:
            make_encoder(tokenizer, str(file), field="style").prompt(MESSAGES)
        assert "\n" not in str(caught.value)
    with pytest.raises(HydrajaxError, match=r"^style: got '/', expected auto"):
        make_encoder(tokenizer, "/", field="style")


def test_a_template_that_fails_is_one_line(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no\nway') }}"
    with pytest.raises(HydrajaxError, match=r"^the chat template failed: no way$"):
        make_encoder(tokenizer).prompt(MESSAGES)


PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
FIRST_PART = "{{ m.content[0].text.strip() }}"  # raises for a text
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS.replace("part.text", "part.text + ','")
EITHER += "{% endif %}"
SYSTEM_AS_TEXT = "{% if m.role == 'system' %}{{ m.content.strip() }}{% else %}" + PARTS + "{% endif %}"
SPOKEN = [("system", "r"), ("user", "user"), ("assistant", "a"), ("user", "user, assistant?")]


def as_template(content: str) -> str:
    return "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}<assistant>"


def said(as_parts=(), spoken=SPOKEN):
    """Messages, of some roles with parts."""
    return [{"role": role, "content": [{"type": "text", "text": t}] if role in as_parts else t} for role, t in spoken]


@pytest.mark.parametrize(
    ("content", "as_parts"),
    [
        (PARTS, ("system", "user", "assistant")),
        (FIRST_PART, ("system", "user", "assistant")),
        (SYSTEM_AS_TEXT, ("user", "assistant")),
        (EITHER, ()),
        ("{{ m.content }}", ()),
        ("{{ m.content | trim | upper | tojson | e }}", ()),
        ("{{ m.content[5:] if m.role == 'assistant' else m.content }}", ()),  # as templates that cut the reasoning do
    ],
)
def test_contents_have_the_form_that_the_template_reads(tokenizer, content, as_parts):
    """The words also occur as roles, so that only a mark can tell whether a template writes them."""
    tokenizer.chat_template = as_template(content)
    right = tokenizer.apply_chat_template(said(as_parts), tokenize=False)
    for given in (said(), said(as_parts)):
        assert make_encoder(tokenizer).render(given, prompt=True) == right
    assert Prompt(said(), "prompt").ids(tokenizer) == tokenizer.encode(right)
    if content == EITHER:  # parts stay parts
        right = tokenizer.apply_chat_template(said(("user",)), tokenize=False)
        assert make_encoder(tokenizer).render(said(("user",)), prompt=True) == right


def test_several_parts_of_a_message(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a ", "b")]}]
    for content in ("{{ m.content }}", PARTS, FIRST_PART):  # texts, any parts, one part
        tokenizer.chat_template = as_template(content)
        assert make_encoder(tokenizer).render(parts, prompt=True) == "<user>a b<assistant>"


def test_each_template_of_a_tokenizer_has_its_own_form(tokenizer):
    tokenizer.chat_template = {"default": OWN, "tool_use": as_template(PARTS + "{{ tools[0].function.name }}")}
    messages = [{"role": "user", "content": "q"}, {"role": "tool", "content": "7"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    encoder = make_encoder(tokenizer)
    assert encoder.render(messages, prompt=True, tools=tools) == "<user>qf<tool>7f<assistant>"
    assert encoder.render(messages, prompt=True) == "user:qtool:7>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
            "messages.0: the .* leaves out messages of role system",
        ),
        ("{% if loop.last %}{{ m.content }}{% endif %}", "messages.0: the chat template leaves out"),
        ("{{ m.text }}", "messages.0: the chat template leaves out messages of role system"),
        ("{% if loop.first %}{{ raise_exception('no system') }}{% endif %}", "the chat template failed: no system"),
    ],
)
def test_no_message_is_left_out_silently(tokenizer, content, message):
    tokenizer.chat_template = as_template(content)
    for prompt in (make_encoder(tokenizer).prompt, lambda messages: Prompt(messages, "prompt").ids(tokenizer)):
        with pytest.raises(HydrajaxError, match=message.replace("the chat", "the.* chat")):
            prompt(said())


def test_an_empty_prompt_is_refused(tokenizer):
    tokenizer.chat_template = BUILT_IN["raw"]
    for text in ("", " \n"):
        for prompt in (make_encoder(tokenizer).prompt, lambda messages: Prompt(messages, "prompt").ids(tokenizer)):
            with pytest.raises(HydrajaxError, match="the chat template writes an empty text"):
                prompt([{"role": "user", "content": text}])
