"""Text that grows by bytes: what is shown stays, is cut at stop strings, and does not depend on how it came."""

import codecs
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrajax.errors import HydrajaxError
from hydrajax.text.stopping import GrowingText, first_stop


def answer():
    """Return a stand-in for a `Continuation`, whose ids are bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return SimpleNamespace(read=lambda byte: decoder.decode(bytes([byte])), rest=lambda: decoder.decode(b"", True))


def decode(ids) -> str:
    """One id per byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition, character by character: the text ends where a stop string is first complete."""
    for end in range(len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


LETTERS = st.text("abcé🌳 \n", max_size=30)
STOPS = st.lists(st.text("abcé🌳 \n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_any_pieces_make_the_cut_text(text, stop, sizes):
    ids, shown, growing = list(text.encode()), "", GrowingText(answer(), stop)
    wanted, stopped = cut(text, stop)
    assert text.find(first_stop(text, stop) or "") == (len(wanted) if stopped else 0)
    end = 0
    while end < len(ids) and not growing.stopped:
        end += sizes[end % len(sizes)]
        piece = growing.grow(ids[:end], final=end >= len(ids))
        shown += piece
        assert shown == growing.text
        assert wanted.startswith(shown)  # nothing shown is ever taken back, no half characters among it
    assert growing.text == wanted
    assert growing.stopped == stopped
    if stopped:  # the ids used are the fewest that complete the stop string
        assert cut(decode(ids[: growing.used]), stop)[1]
        assert not cut(decode(ids[: growing.used - 1]), stop)[1]
        assert growing.grow(ids) == ""
    else:
        assert growing.used == len(ids)


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    growing = GrowingText(answer(), ["\n\n", "END"])
    assert growing.grow(b"a\n") == "a"
    assert growing.grow(b"a\nE") == "\n"
    assert growing.grow(b"a\nEN") == ""
    assert growing.grow(b"a\nENT") == "ENT"
    assert growing.grow(b"a\nENTE", final=True) == "E"
    assert not growing.stopped


def test_half_a_character_is_held_back_and_shown_at_the_end():
    tree = list("🌳".encode())
    growing = GrowingText(answer())
    assert [growing.grow(tree[:n]) for n in range(1, 5)] == ["", "", "", "🌳"]
    cut_off = GrowingText(answer())
    assert cut_off.grow(tree[:2]) == ""
    assert cut_off.grow(tree[:2], final=True) != ""


def test_the_stop_string_that_is_complete_first_counts_and_of_those_the_longest():
    for stop, text in ((["b", "abc"], "a"), (["abc", "c"], ""), (["bc", "abc"], "")):
        growing = GrowingText(answer(), stop)
        growing.grow(b"abcd")
        assert growing.text == text
    with pytest.raises(HydrajaxError, match="stop: got an empty string"):
        GrowingText(answer(), ["a", ""])


def test_stop_tokens_and_stops_that_are_included():
    x, ids = ord("x"), "aéxb".encode()
    for stop, stop_ids, include, text, reason in (
        ([], [x], False, "aé", x), ([], [x], True, "aéx", x),
        (["é"], [x], True, "aé", "é"), (["b"], [0], True, "aéxb", "b"),
        (["xb"], [x], False, "aé", x), ([], [ids[1]], False, "a", ids[1]), ([], [0], True, "aéxb", None),
    ):  # fmt: skip
        for sizes in ([1] * len(ids), [len(ids)]):
            growing, end = GrowingText(answer(), stop, stop_ids, include), 0
            for size in sizes:
                end += size
                growing.grow(ids[:end], final=end == len(ids))
            assert (growing.text, growing.reason, growing.stopped) == (text, reason, reason is not None)


def test_a_character_that_is_not_complete_is_no_stop_string():
    """U+FFFD, which decoders show for it, is found where a byte is wrong, whose text no later byte changes."""
    ids = "é".encode() + b"a\xffbc"
    for sizes in ([1] * 6, [6], [2, 4], [3, 3]):
        growing, end = GrowingText(answer(), ["\ufffd"]), 0
        for size in sizes:
            end += size
            growing.grow(ids[:end], final=end == len(ids))
        assert (growing.text, growing.used) == ("éa", 4)
