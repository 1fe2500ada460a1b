"""Encoding conversations: the targets are the assistant's tokens and the end mark, and no others."""

import copy

import numpy as np
import pytest

from helpers.refusals import assert_refused
from hydrajax.cli.train import marked
from hydrajax.text.templates import VICUNA_SYSTEM
from hydrajax.train.data.conversations import Conversation, DialogueTurn
from hydrajax.train.data.encode import encode_conversations
from hydrajax.train.data.packing import Document

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no system\nhere') }}{% endif %}{% endfor %}"
)
PLAIN_MARK = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n### end\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
GENERATION = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']:' }}{% if m.role == 'assistant' %}"
    "{%- generation %}{{ ' ' + m.content }}{% endgeneration %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
NO_MARK = (
    "{% for m in messages %}{{ '[' + m.role + ']:\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]:\n' }}{% endif %}"
)
GENERATION_WITHOUT_MARK = (
    "{% for m in messages %}{{ bos_token + m.role }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)

TURNS = (
    ("user", "What is a tree?"),
    ("assistant", "A  graph without cycles: naïve 🌲🌲\n    it has\n\n        indented lines."),
    ("user", "A graph without cycles?"),
    ("assistant", "🦔"),  # one character, four tokens
)


def encode_conversation(tokenizer, one, template="auto"):
    return encode_conversations(tokenizer, [one], template)[0][0]


def conversation(*turns, where="f line 1"):
    return Conversation(tuple(DialogueTurn(*turn) for turn in turns), where)


@pytest.fixture(scope="module", params=["spaces in offsets", "offsets trimmed"])
def tokenizer(request):
    """A byte-level BPE that adds <s> by default, as LLaMA's does; trimmed offsets leave out the spaces of a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    others = ["USER: ASSISTANT: graph [INST] [/INST]:\n        .</s>", "]:::", "]: ::"]
    texts = [*(content for _, content in TURNS[:3]), *others] * 3
    bpe.train_from_iterator(texts, trainer)
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
    trim = processors.ByteLevel(trim_offsets=request.param == "offsets trimmed")
    bpe.post_processor = processors.Sequence([trim, bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[AddedToken(text, special=True) for text in special[2:]],
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def with_template(tokenizer, monkeypatch):
    def use(source):
        monkeypatch.setattr(tokenizer, "chat_template", source)
        return tokenizer

    return use


def target_texts(document, tokenizer) -> list[str]:
    """The text of each run of targets."""
    edges = np.flatnonzero(np.diff(document.targets, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizer.decode(document.ids[start:end], skip_special_tokens=False) for start, end in edges]


ANSWERS = [TURNS[1][1], TURNS[3][1]]


TEMPLATES = [
    (CHATML, "", "<|im_end|>"),  # without the newline that the template writes after it
    (LLAMA_2, " ", " </s>"),  # the generation prompt is "[/INST]": the model writes the space
    (PLAIN_MARK, "", "\n### end"),  # the end mark is not a special token
    (NO_MARK, "", ""),  # the last byte of the last answer ends it
    (GENERATION, " ", "</s>"),  # the end mark is just outside {% generation %}
    (GENERATION_WITHOUT_MARK, "", ""),  # there is no end mark: <s> begins the next turn
]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]


def test_answers_and_end_marks_are_learnt(with_template):
    for source, before, after in TEMPLATES:
        tokenizer = with_template(source)
        document = encode_conversation(tokenizer, conversation(*TURNS))
        assert target_texts(document, tokenizer) == [before + answer + after for answer in ANSWERS]
        # The ids are transformers' own for the conversation.
        assert document.ids.tolist() == tokenizer.apply_chat_template(MESSAGES, return_dict=False)
        assert (document.ids.dtype, document.targets.dtype) == (np.int32, bool)


def test_marked_templates_agree_with_the_mask_of_transformers(with_template):
    """For answers that begin without a space: transformers' mask omits others if offsets are trimmed."""
    source = GENERATION.replace("' ' + ", "").replace(
        "{% endgeneration %}{{ eos_token }}", "{{ eos_token }}{% endgeneration %}"
    )
    tokenizer = with_template(source)
    theirs = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    document = encode_conversation(tokenizer, conversation(*TURNS))
    assert document.ids.tolist() == theirs["input_ids"]
    assert document.targets.tolist() == [bool(mark) for mark in theirs["assistant_masks"]]


def test_vicuna_and_plain(tokenizer):
    """Written out as in FastChat's conversation.py: separators " " and "</s>", roles USER and ASSISTANT."""
    (_, q1), (_, a1), (_, q2), (_, a2) = TURNS
    document = encode_conversation(tokenizer, conversation(*TURNS), "vicuna")
    text = f"{VICUNA_SYSTEM} USER: {q1} ASSISTANT: {a1}</s>USER: {q2} ASSISTANT: {a2}</s>"
    assert document.ids.tolist() == tokenizer.encode(text)
    assert document.ids[0] == tokenizer.bos_token_id != document.ids[1]
    assert target_texts(document, tokenizer) == [f" {a1}</s>", f" {a2}</s>"]
    with_system = encode_conversation(tokenizer, conversation(("system", "Be brief."), *TURNS[:2]), "vicuna")
    assert tokenizer.decode(with_system.ids).startswith("<s>Be brief. USER: What is a tree? ASSISTANT: A  graph")
    document = encode_conversation(tokenizer, conversation(*TURNS), "plain")
    assert tokenizer.decode(document.ids) == f"<s>{q1}\n{a1}</s>{q2}\n{a2}</s>"
    assert target_texts(document, tokenizer) == [f"{a1}</s>", f"{a2}</s>"]


def test_a_token_that_reaches_into_the_prompt(with_template):
    """It is a target if it covers only spaces of the prompt, and not if it covers words."""
    for between, answer, expected in (
        (" ", "graph", " graph</s>"),  # the token " graph" takes the space that ends the prompt
        ("]:", ":Yes", "Yes</s>"),  # "]::" is one token of this vocabulary
    ):
        tokenizer = with_template(
            "{% for m in messages %}{{ m.role + '" + between + "' + m.content }}"
            "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant" + between + "' }}{% endif %}"
        )
        document = encode_conversation(tokenizer, conversation(TURNS[0], ("assistant", answer)))
        assert target_texts(document, tokenizer) == [expected]


def test_what_follows_an_answer_is_not_learnt(with_template):
    """Neither a token that reaches into the next prompt, nor a question after the last answer."""
    tokenizer = with_template(
        "{% for m in messages %}{{ ('::' if m.role == 'user' else '=') + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '=' }}{% endif %}"
    )
    document = encode_conversation(tokenizer, conversation(TURNS[0], ("assistant", "Yes]"), ("user", "So")))
    assert tokenizer.decode(document.ids).endswith("=Yes]::So")
    assert target_texts(document, tokenizer) == ["Yes"]
    document = encode_conversation(with_template(CHATML), conversation(*TURNS[:3]))
    assert target_texts(document, tokenizer) == [ANSWERS[0] + "<|im_end|>"]


OTHERS = "m.content if m.role == 'user' else "
UNENCODABLE = [
    (LLAMA_2, [("system", "s"), *TURNS], "the chat template failed: no system here"),
    # As in templates of reasoning models: earlier answers are cut, or the prompt opens the reasoning.
    (
        CHATML.replace("m.content", f"({OTHERS}m.content if loop.last else m.content[1:])"),
        TURNS,
        "changes message 2 once others follow",
    ),
    (CHATML.replace("assistant\n", "assistant\n<think>"), TURNS, "begins message 2 unlike its generation"),
    # The text contains the answer, but at another place.
    (
        CHATML.replace("m.content", f"({OTHERS}'x')"),
        [("user", "Yes"), ("assistant", "Yes")],
        "changes the answer 'Yes'",
    ),
    (CHATML.replace("m.content", "m.content.upper()"), TURNS, "changes the answer 'A  graph without"),
    (CHATML, [("user", "say </s>"), TURNS[1]], "message 1 contains the special token </s>"),
    (CHATML, [TURNS[0], ("assistant", "a<|im_end|>b")], "message 2 contains the special token <|im_end|>"),
    ("{{ bos_token + bos_token }}" + CHATML, TURNS, "writes BOS twice"),
    (GENERATION.replace("'assistant'", "'user'"), TURNS[:3], "marks 2 answers, expected 1"),
]


def test_conversations_that_are_refused(with_template):
    for source, turns, reason in UNENCODABLE:
        message = f"none of 2 conversations can be encoded; the first: f line 1: ...{reason}"
        assert_refused(encode_conversations, (with_template(source), [conversation(*turns)] * 2, message))


def test_one_bad_conversation_among_good_ones(with_template):
    tokenizer = with_template(CHATML)
    bad = conversation(("user", "</s>"), TURNS[1], where="f line 7")
    documents, left_out = encode_conversations(tokenizer, [conversation(*TURNS), bad, conversation(*TURNS[:2])])
    assert [len(target_texts(document, tokenizer)) for document in documents] == [2, 1]
    assert left_out == [("f line 7", "message 1 contains the special token </s>")]


def test_settings_that_do_not_go_together_are_named_as_the_config_names_them(with_template):
    tokenizer, one = with_template(None), conversation(*TURNS)
    assert_refused(
        encode_conversations,
        (tokenizer, [one], "data.template: the tokenizer has no chat ...data.template=plain"),
        (tokenizer, [one], "alpaca", "data.template: got 'alpaca', expected auto, vicuna, plain"),
        (object(), [one], "vicuna", "data.tokenizer: got object, expected a fast tokenizer"),
    )


def test_a_tokenizer_that_adds_eos_gives_one(tokenizer):
    from tokenizers import processors

    special = [(text, tokenizer.convert_tokens_to_ids(text)) for text in ("<s>", "</s>")]
    closing = copy.deepcopy(tokenizer)
    closing.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    assert closing.encode("a</s>")[-2:] == [tokenizer.eos_token_id] * 2
    document = encode_conversation(closing, conversation(*TURNS), "vicuna")
    assert document.ids.tolist().count(tokenizer.eos_token_id) == 2
    assert document.targets[-1]
    assert not document.targets[0]


def test_templates_that_read_parts_only_give_the_same_targets(with_template):
    for source in (CHATML, GENERATION):
        texts, parts = (
            encode_conversation(with_template(source.replace("m.content", content)), conversation(*TURNS))
            for content in ("m.content", "m.content[0].text")
        )
        assert parts.ids.tolist() == texts.ids.tolist()
        assert parts.targets.tolist() == texts.targets.tolist()


def test_a_preview_marks_the_targets(tokenizer):
    """With brackets, or with colours on a terminal; markup of rich is text. A decoder of SentencePiece drops spaces."""
    question, answer = "How many [b]ears[/b] are there?", "Two: naïve\n  ones."
    turns = ("user", question), ("assistant", answer)
    document = encode_conversation(tokenizer, conversation(*turns, *turns), "plain")
    expected = f"<s>{question}\n⟦{answer}</s>⟧{question}\n⟦{answer}</s>⟧"
    unmarked = expected.replace("⟦", "").replace("⟧", "")
    assert marked(document, tokenizer, color=False).plain == expected
    assert marked(Document(document.ids, document.targets & False), tokenizer, color=False).plain == unmarked
    colored = marked(document, tokenizer)
    assert colored.plain == unmarked
    targets = [colored.plain[span.start : span.end] for span in colored.spans if "green" in str(span.style)]
    assert targets == [f"{answer}</s>"] * 2

    class Dropping:
        def decode(self, ids, **_):
            return "".join([" a", " b", " c"][token] for token in ids).removeprefix(" ")

    document = Document(np.array([0, 1, 2]), np.array([False, True, False]))
    assert marked(document, Dropping(), color=False).plain == "a⟦ b⟧ c"
