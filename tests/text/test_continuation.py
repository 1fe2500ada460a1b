"""Text and bytes of tokens that follow a prompt, against transformers' text of all tokens; and drafted pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydrajax
from helpers import scripted, small_tokenizer
from helpers.scripted import THE, TRE, TREE
from hydrajax.conversation import Chat
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import INCOMPLETE, Continuation, visible
from hydrajax.text.marking import pieces, text_of
from hydrajax.text.tokenizer import decode_text


@pytest.fixture(scope="module")
def model():
    return scripted.model()


def after(tokenizer, prompt, ids) -> str:
    """The text of all tokens from where it is no longer that of the prompt."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, whole = tokenizer.decode(prompt, **options), tokenizer.decode([*prompt, *ids], **options)
    same = next((at for at, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    return whole[same:]


@pytest.mark.parametrize("kind", ["byte level", "llama", "always", "first", "never", "strip"])
def test_the_text_is_that_of_all_tokens_without_the_prompts(kind):
    from tokenizers import decoders

    tokenizer = small_tokenizer.byte_level() if kind == "byte level" else small_tokenizer.metaspace()
    if kind == "strip":
        steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    elif kind in ("always", "first", "never"):
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=kind)]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    # Next to a wrong byte, tokenizers with byte tokens drop whole characters: here only ASCII and words.
    some = np.r_[0:300] if kind == "byte level" else np.r_[0:3, 35:131, 259:277]
    random = np.random.default_rng(0)
    for _ in range(200):
        prompt, ids = (random.choice(some, random.integers(0, 8)).tolist() for _ in range(2))
        answer, expected = Continuation(tokenizer, np.array(prompt, np.int32)), after(tokenizer, prompt, ids)
        data, text = b"", ""
        for token in ids:
            assert answer.offset == len(text)
            data, text = data + answer.data(token), text + answer.read(token)
        assert text + answer.rest() == expected
        assert kind == "byte level" or data.decode() == expected


def test_whole_characters_next_to_a_part_of_one_stay():
    """A stream has shown them."""
    assert Continuation(small_tokenizer.metaspace(), [THE]).text([*TREE, *TREE[:2]]) == "🌳" + 2 * INCOMPLETE


@pytest.mark.parametrize("prompt", [[1, THE], [TRE, *TREE[:2]]])
@pytest.mark.parametrize("limit", [3, 10])
def test_answers_continue_the_prompt(model, prompt, limit):
    (found,) = model.generate([prompt], tree="root", max_new_tokens=limit)
    assert found.text == after(model.tokenizer, found.prompt_ids, found.output_ids)
    assert "".join(model.stream(prompt, tree="root", max_new_tokens=limit)) == found.text


def test_stop_strings_and_grammars_have_the_first_space(model):
    found = model.generate("the", tree="root", max_new_tokens=10, stop=[" tre"])
    assert (found.text, found.finish_reason) == ("", "stop")
    pytest.importorskip("llguidance")
    assert model.generate("the", tree="root", grammar=hydrajax.Grammar.regex(" (tre|e)")).text in (" tre", " e")


@pytest.mark.parametrize("template", [scripted.SPACED, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_message_begins_with_the_space_unless_the_template_writes_it(template):
    model = scripted.model(template)
    chat = Chat(model.executor(model.program(tree="root", max_new_tokens=10)))
    assert "".join(chat.send("the")) == scripted.TEXT
    assert chat.messages[-1]["content"] == scripted.TEXT.removeprefix(" " * (template == scripted.SPACED))


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer.byte_level()


def generation(output_ids, accept_lengths, text=None) -> Generation:
    return Generation([1], list(output_ids), text, len(accept_lengths), accept_lengths, len(output_ids), 1.0)


@st.composite
def outputs(draw, vocab: int):
    accept_lengths = draw(st.lists(st.integers(1, 5), max_size=12))
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=sum(accept_lengths), max_size=sum(accept_lengths)))
    return ids, accept_lengths


@settings(max_examples=100, deadline=None)
@given(output=outputs(320))
def test_marked_text_is_the_decoded_text(tokenizer, output):
    ids, accept_lengths = output
    result = generation(ids, accept_lengths, decode_text(tokenizer, ids))
    assert "".join(text for text, _ in pieces(tokenizer, result)) == result.text


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(text=st.text(min_size=1, max_size=30), data=st.data())
def test_marked_text_is_the_text_of_real_unicode(tokenizer, text, data):
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=10))) if len(ids) > 1 else []
    accept_lengths = np.diff([0, *cuts, len(ids)]).tolist()
    marked = pieces(tokenizer, generation(ids, accept_lengths, text))
    assert "".join(piece for piece, _ in marked) == text
    assert not any("\ufffd" in piece for piece, _ in marked) or "\ufffd" in text


def test_each_token_is_marked_as_what_it_was(tokenizer):
    ids = [token for word in ("a", "b", "cd", "e", "f") for token in tokenizer.encode(word, add_special_tokens=False)]
    assert len(ids) == 6
    # Steps of 3, 1 and 2 tokens: the first of each is the base's.
    marked = pieces(tokenizer, generation(ids, [3, 1, 2], "abcdef"))
    assert marked == [("a", False), ("bc", True), ("d", False), ("e", False), ("f", True)]


def test_a_split_character_belongs_to_the_token_that_completes_it(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "Ċ"] + tokenizer.encode("ж", add_special_tokens=False)
    assert len(ids) == 3  # a newline, and a character of two bytes that the tokenizer never saw
    assert pieces(tokenizer, generation(ids, [1, 2], "\nж")) == [("\n", False), ("ж", True)]
    assert pieces(tokenizer, generation(ids, [2, 1], "\nж")) == [("\n", False), ("ж", False)]


def test_ids_are_marked_where_there_is_no_text():
    result = generation([12, 3, 405], [2, 1])
    assert pieces(None, result) == [("12", False), (" 3", True), (" 405", False)]
    assert text_of(result) == "12 3 405"


def test_one_token_on_one_line(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["Ġthe", "Ċ", "'", "Ġ"])
    assert [visible(tokenizer, token) for token in (-1, *ids, len(tokenizer))] == ["∅", "·the", "\\n", "'", "·", "∅"]
    spaced = small_tokenizer.metaspace()
    ids = spaced.convert_tokens_to_ids(["▁the", "re", "<0x0A>", "</s>"])
    assert [visible(spaced, token) for token in ids] == ["·the", "re", "\\n", "</s>"]
    assert visible(None, 17) == "17"
