"""The reasoning of answers: how the prompt begins it, its parts whole and in pieces, and variables of templates."""

import pytest

from helpers.growing import streamed, whole
from helpers.json_letters import shipped_tokenizer
from helpers.lab import CONFIG
from hydrajax.errors import HydrajaxError
from hydrajax.serve.call_formats.tagged import TaggedCalls
from hydrajax.serve.options import ServerOptions
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
    (" \n<think>so </think> a", False, " a", "so ", ""),
    ("<think>\n\n</think>\n\na", False, "a", "", ""),
    ("<think>\nso\n", False, "", "so", ""),  # cut off
    ("so </thin", True, "", "so </thin", ""),
    ("", True, "", "", ""),
    ("<thi", False, "<thi", "", ""),
    (f"<think>I could {CALL} it\n</think>\n\n{CALL}", False, "", f"I could {CALL} it", '{"a": 1}'),
    (f"I could {CALL}", True, "", f"I could {CALL}", ""),
    (f"so</think>\nI do\n{CALL}", True, "I do", "so", '{"a": 1}'),
]


@pytest.fixture(scope="module", params=["tokens", "special tokens", "several tokens"])
def tokenizer(request):
    added = [] if request.param == "several tokens" else ["<think>", "</think>"]
    return shipped_tokenizer(*added, special=request.param == "special tokens")


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def thinking(tokenizer, opened: bool, name: str = "qwen3") -> Thinking:
    return Thinking.of(name, "", tokenizer).after("<think>" if opened else "")


@pytest.mark.parametrize(("text", "opened", "content", "reasoning", "arguments"), CASES)
def test_an_answer_that_grows_token_by_token(tokenizer, text, opened, content, reasoning, arguments):
    form, ids = thinking(tokenizer, opened).reader(TaggedCalls({}, set())), ids_of(tokenizer, text)
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
    if end in ids and ids[0] in (begin, *ids[: 99 * opened]):
        assert choice.reasoning_tokens() == ids.index(end) - (ids[0] == begin)
    elif not reasoning:
        assert choice.reasoning_tokens() == 0


def test_marks_are_tokens_and_no_texts():
    """Other tokens may spell a mark; the grammar does not begin there either."""
    tokenizer = shipped_tokenizer("<think>", "</think>")
    spelled = ids_of(shipped_tokenizer(), "so </think> b")
    ids = [*spelled, tokenizer.convert_tokens_to_ids("</think>"), *ids_of(tokenizer, "a")]
    _, parts, _ = streamed(thinking(tokenizer, True).reader(None), tokenizer, ids)
    assert parts == {"content": "a", "reasoning_content": "so </think> b"}


def test_the_label_of_gemma_is_no_reasoning():
    tokenizer = shipped_tokenizer("<|channel>", "<channel|>", special=True)
    for text, reasoning in (("thought\nso", "so"), ("thought\n", ""), ("thoughtful", "thoughtful")):
        form = Thinking.of("gemma4", "", tokenizer).reader(None)
        ids = ids_of(tokenizer, f"<|channel>{text}<channel|>a")
        _, parts, _ = streamed(form, tokenizer, ids)
        assert parts == {"content": "a", "reasoning_content": reasoning}


def encoder(template: str, **options) -> RequestEncoder:
    tokenizer = shipped_tokenizer("<think>", "</think>")
    tokenizer.chat_template = template
    return RequestEncoder(tokenizer, CONFIG.replace(vocab_size=len(tokenizer), max_positions=4096), **options)


@pytest.mark.parametrize(
    ("template", "options", "given", "opened"),
    [
        (QWEN3, {}, {}, False),
        (QWEN3, {}, {"variables": {"enable_thinking": True}}, False),
        (QWEN3, {}, {"variables": {"enable_thinking": False}}, None),
        (QWEN3, {"variables": {"enable_thinking": False}}, {}, None),
        (QWEN3, {"variables": {"enable_thinking": False}}, {"variables": {"enable_thinking": True}}, False),
        (QWEN3, {"variables": {"enable_thinking": False}}, {"effort": "high"}, False),
        (QWEN3, {}, {"effort": "none"}, None),
        (QWEN3, {}, {"effort": "none", "variables": {"enable_thinking": True}}, False),
        (QWEN3, {"reasoning_parser": "none"}, {}, None),
        (QWEN3, {"reasoning_parser": "deepseek_r1"}, {}, True),
        (QWEN3, {"reasoning_parser": "deepseek_r1"}, {"variables": {"enable_thinking": False}}, None),
        (R1, {}, {}, True),
        (R1, {}, {"header": False}, False),
        (MESSAGES, {}, {}, False),
        (EFFORT, {}, {"effort": "low"}, False),
        ("{{ messages[0].content }}", {}, {}, None),
        ("{{ messages[0].content }}", {"reasoning_parser": "qwen3"}, {}, False),
    ],
)
def test_the_prompt_begins_or_ends_the_reasoning(template, options, given, opened):
    """Marks that a user writes do neither."""
    made = encoder(template, **options)
    ids, found = made.conversation(SAYS, **given)
    assert (found and found.opened) == opened
    if given.get("effort") == "low":
        assert made.text(ids.tolist()).startswith("low[")


def test_an_answer_that_continues_a_message():
    made = encoder("{% for m in messages %}[{{ m.content }}]{% endfor %}</think>")
    for content, opened in (("<think>so", True), ("<think>so</think>a", None), ("a", False)):
        last = {"role": "assistant", "content": content}
        ids, found = made.conversation([*SAYS, last], header=False, continued=True)
        assert (found and found.opened) == opened
        assert not made.text(ids.tolist()).endswith("]")


@pytest.mark.parametrize(
    ("template", "given", "message"),
    [
        (
            QWEN3,
            {"variables": {"thinking": True}},
            "chat_template_kwargs: got thinking, which the chat templ",
        ),
        (R1, {"variables": {"effort": 1}}, "chat_template_kwargs: got effort, which the chat template does not have"),
        (QWEN3, {"variables": {"messages": []}}, "chat_template_kwargs: got messages, which cannot be set here"),
        (QWEN3, {"variables": {"chat_template": "a"}}, "chat_template_kwargs: got chat_template, which cannot be set"),
        (QWEN3, {"variables": {"eos_token": "a"}}, "chat_template_kwargs: got eos_token, which cannot be set here"),
        (
            QWEN3,
            {"variables": {"enable_thinking": ["<|endoftext|>"]}},
            "chat_template_kwargs: contains the special token",
        ),
        (R1, {"effort": "low"}, "reasoning_effort: got one, but the chat template has no such variable; leave it out"),
    ],
)
def test_variables_that_the_template_does_not_have(template, given, message):
    with pytest.raises(HydrajaxError, match=rf"^{message}"):
        encoder(template).conversation(SAYS, **given)


def test_options():
    assert ServerOptions.checked({"chat_template_kwargs": '{"a": false}'}).chat_template_kwargs == {"a": False}
    assert set(MARKS) < set(PARSERS)
    for options, message in (
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs: got '{', expected a JSON object"),
        ({"chat_template_kwargs": "[]"}, r"chat_template_kwargs: got \[\], expected an object"),
        ({"reasoning_parser": "qwen"}, "reasoning_parser: got 'qwen', expected auto, none, qwen3, "),
    ):
        with pytest.raises(HydrajaxError, match=rf"^{message}"):
            ServerOptions.checked(options)
    with pytest.raises(HydrajaxError, match=r"^reasoning_parser: got openai_gptoss, but the chat template has no chan"):
        encoder(QWEN3, reasoning_parser="openai_gptoss")
    with pytest.raises(HydrajaxError, match=r"^chat_template_kwargs: got thinking"):
        encoder(QWEN3, variables={"thinking": True})
