"""Outputs cut where drafted and base tokens meet: whatever is cut, the pieces are the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import small_tokenizer
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import visible
from hydrajax.text.marking import pieces, text_of
from hydrajax.text.tokenizer import decode_text


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
