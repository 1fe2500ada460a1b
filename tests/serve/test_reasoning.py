"""The reasoning of answers: how the prompt begins it, its parts whole and in pieces, and variables of templates."""

import dataclasses

import pytest

from helpers.growing import reply, result_of, streamed, whole
from helpers.json_letters import shipped_tokenizer
from helpers.lab import CONFIG
from hydrajax.errors import HydrajaxError
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.options import ServerOptions
from hydrajax.serve.protocol import TemplateFields
from hydrajax.serve.reasoning import MARKS, PARSERS, Thinking
from hydrajax.serve.request_encoder import RequestEncoder

CALL = '<tool_call>\n{"name": "ab", "arguments": {"a": 1}}\n</tool_call>'
SAYS = [{"role": "user", "content": "what does </think> mean?"}]
# As the templates of Qwen 3, DeepSeek R1 and Qwen 3 2507, shortened.
MESSAGES = """{% for m in messages %}[{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}]\
{% endfor %}"""
QWEN3 = (
    MESSAGES
    + """{% if add_generation_prompt %}A:{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
)
R1 = MESSAGES + "{% if add_generation_prompt %}A:<think>\n{{ messages[0].effort }}{% endif %}"
EFFORT = "{{ reasoning_effort }}" + MESSAGES

CASES = [  # an answer, whether the prompt has opened the reasoning; content, reasoning and arguments of a call
    ("<think>\nso <b>é\n\n</think>\n\na {}", False, "a {}", "so <b>é", ""),
    ("so\n</think>\n\na <think>b</think>", True, "a <think>b</think>", "so", ""),
    ("<think>so\n</think>a", True, "a", "so", ""),  # opened again
    ("a <think>b</think>", False, "a <think>b</think>", "", ""),
    (" \n<think>so </think>a", False, "a", "so ", ""),
    ("<think>\n\n</think>\n\na", False, "a", "", ""),
    ("\n<think>so it is</think>a", False, "a", "so it is", ""),
    ("<think>\nso\n", False, "", "so", ""),  # cut off
    ("so </thin", True, "", "so </thin", ""),
    ("", True, "", "", ""),
    ("<thi", False, "<thi", "", ""),
    (f"<think>I could {CALL} it\n</think>\n\n{CALL}", False, "", f"I could {CALL} it", '{"a": 1}'),
    (f"I could {CALL}", True, "", f"I could {CALL}", ""),
    (f"so</think>\nI do\n{CALL}", True, "I do", "so", '{"a": 1}'),
]


@pytest.fixture(scope="module", params=["tokens", "special tokens"])
def tokenizer(request):
    return shipped_tokenizer("<think>", "</think>", special=request.param == "special tokens")


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def thinking(tokenizer, opened: bool, name: str = "qwen3") -> Thinking:
    return Thinking.of(name, "", tokenizer).after("<think>" if opened else "")


@pytest.mark.parametrize(("text", "opened", "content", "reasoning", "arguments"), CASES)
def test_an_answer_that_grows_token_by_token(tokenizer, text, opened, content, reasoning, arguments):
    form = dataclasses.replace(thinking(tokenizer, opened), calls=TaggedCalls({}, set()))
    ids = ids_of(tokenizer, text)
    special = "<think>" in tokenizer.all_special_tokens
    if special:  # no text has them
        content = content.replace("<think>", "").replace("</think>", "")
    choice, parts, calls = streamed(form, tokenizer, ids)
    assert parts == {"content": content, "reasoning_content": reasoning}
    assert "".join(piece["function"]["arguments"] for piece in calls) == arguments
    message = whole(form, tokenizer, ids)
    assert (message["content"] or "", message.get("reasoning_content", "")) == (content, reasoning)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert "reasoning_content" not in whole(form, tokenizer, ids, reasoning=False)
    begin, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    if end in ids and (opened or begin in ids[:2]):
        assert choice.reasoning_tokens() == ids.index(end) - (ids.index(begin) + 1 if begin in ids[:2] else 0)
    elif not reasoning:
        assert choice.reasoning_tokens() == 0


def test_marks_are_tokens_and_no_texts():
    """Other tokens may spell a mark; the grammar does not begin there either."""
    tokenizer = shipped_tokenizer("<think>", "</think>")
    spelled = ids_of(shipped_tokenizer(), "so </think> b")
    ids = [*spelled, tokenizer.convert_tokens_to_ids("</think>"), *ids_of(tokenizer, "a")]
    _, parts, _ = streamed(thinking(tokenizer, True), tokenizer, ids)
    assert parts == {"content": "a", "reasoning_content": "so </think> b"}


def test_a_stop_string_ends_the_reasoning(tokenizer):
    choice, ids = reply(thinking(tokenizer, True), tokenizer), ids_of(tokenizer, "so far</think>a")
    choice.handle.result = result_of(tokenizer, ids, " far")
    assert choice.delta(True)[::5] == ("", "so")


def test_the_label_of_gemma_is_no_reasoning():
    tokenizer = shipped_tokenizer("<|channel>", "<channel|>", special=True)
    for text, reasoning in (("thought\nso", "so"), ("thought\n", ""), ("thoughtful", "thoughtful")):
        form = Thinking.of("gemma4", "", tokenizer)
        ids = ids_of(tokenizer, f"<|channel>{text}<channel|>a")
        _, parts, _ = streamed(form, tokenizer, ids)
        assert parts == {"content": "a", "reasoning_content": reasoning}


def encoder(template: str, **options) -> RequestEncoder:
    tokenizer = shipped_tokenizer("<think>", "</think>")
    tokenizer.chat_template = template
    return RequestEncoder(tokenizer, CONFIG.replace(vocab_size=len(tokenizer), max_positions=4096), **options)


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
OFF = {"variables": {"enable_thinking": False}}
R1_PARSER = {"reasoning_parser": "deepseek_r1"}


@pytest.mark.parametrize(
    ("template", "options", "given", "opened"),
    [
        (QWEN3, {}, {}, False),
        (QWEN3, {}, THINKING, False),
        (QWEN3, {}, NO_THINKING, None),
        (QWEN3, OFF, {}, None),
        (QWEN3, OFF, THINKING, False),
        (QWEN3, OFF, {"reasoning_effort": "high"}, False),
        (QWEN3, {}, {"reasoning_effort": "none"}, None),
        (QWEN3, {}, {"reasoning_effort": "none"} | THINKING, False),
        (QWEN3, {"reasoning_parser": "none"}, {}, None),
        (QWEN3, R1_PARSER, {}, True),
        (QWEN3, R1_PARSER, NO_THINKING, None),
        (R1, {}, {}, True),
        (MESSAGES, {}, {}, False),
        (EFFORT, {}, {"reasoning_effort": "low"}, False),
        ("{{ messages[0].content }}", {}, {}, None),
        ("{{ messages[0].content }}", {"reasoning_parser": "qwen3"}, {}, False),
    ],
)
def test_the_prompt_begins_or_ends_the_reasoning(template, options, given, opened):
    """Marks that a user writes do neither."""
    made = encoder(template, **options)
    ids, found = made.conversation(SAYS, fields=TemplateFields(**given))
    assert (found and found.opened) == opened
    if template is EFFORT:
        assert made.text(ids.tolist()).startswith("low[")


def test_an_answer_that_continues_a_message():
    made = encoder("{% for m in messages %}[{{ m.content }}]{% endfor %}</think>")
    for content, opened in (("<think>so", True), ("<think>so</think>a", None), ("a", False)):
        given = {"messages": [*SAYS, {"role": "assistant", "content": content}], "add_generation_prompt": False}
        fields = TemplateFields(**given, continue_final_message=True)
        ids, found = made.conversation(given["messages"], fields=fields)
        assert (found and found.opened) == opened
        assert made.text(ids.tolist()).endswith(content)


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        (QWEN3, {"thinking": True}, "got thinking, which is no variable of the chat template"),
        (R1, {"effort": 1}, "got effort, which is no variable"),
        (QWEN3, {"messages": []}, "got messages, which is no variable"),
        (QWEN3, {"chat_template": "a"}, "got chat_template, which is no variable"),
        (QWEN3, {"eos_token": "a"}, "got eos_token, which is no variable"),
        (QWEN3, {"enable_thinking": ["<|endoftext|>"]}, r"contains the special token <\|endoftext"),
    ],
)
def test_variables_that_the_template_does_not_have(template, variables, message):
    with pytest.raises(HydrajaxError, match=rf"^chat_template_kwargs: {message}"):
        encoder(template).conversation(SAYS, fields=TemplateFields(chat_template_kwargs=variables))
    with pytest.raises(HydrajaxError, match=r"^chat_template_kwargs: "):
        encoder(template, variables=variables)


def test_options_and_fields():
    assert ServerOptions.checked({"chat_template_kwargs": '{"a": false}'}).chat_template_kwargs == {"a": False}
    assert set(MARKS) < set(PARSERS)
    for options, message in (
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs: got '{', expected a JSON object"),
        ({"chat_template_kwargs": "[]"}, r"chat_template_kwargs: got \[\], expected an object"),
        ({"reasoning_parser": "qwen"}, "reasoning_parser: got 'qwen', expected auto, none, qwen3, "),
    ):
        with pytest.raises(HydrajaxError, match=rf"^{message}"):
            ServerOptions.checked(options)
    for parser, message in (
        ("openai_gptoss", "the chat template has no chan"),
        ("seed_oss", "</seed:think> is not"),
    ):
        with pytest.raises(HydrajaxError, match=rf"^reasoning_parser: got {parser}, but {message}"):
            encoder(QWEN3, reasoning_parser=parser)
    with pytest.raises(HydrajaxError, match=r"^reasoning_effort: got one, but it is no variable of the chat template"):
        encoder(R1).conversation(SAYS, fields=TemplateFields(reasoning_effort="low"))
    with pytest.raises(ValueError, match="continue_final_message: requires add_generation_prompt=false"):
        TemplateFields(messages=SAYS, continue_final_message=True)
    with pytest.raises(ValueError, match="continue_final_message: requires a last message of role assistant"):
        TemplateFields(messages=SAYS, continue_final_message=True, add_generation_prompt=False)
