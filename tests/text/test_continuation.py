"""Text and bytes of tokens that follow a prompt, against transformers' text of all tokens."""

from __future__ import annotations

import numpy as np
import pytest

import hydrajax
from helpers import scripted, small_tokenizer
from helpers.scripted import THE, TRE, TREE
from hydrajax.conversation import Chat
from hydrajax.text.continuation import INCOMPLETE, Continuation


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
