"""The preview: the whole text, with marks where targets begin and end."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from hydrajax.train.data.conversations import Conversation, DialogueTurn
from hydrajax.train.data.corpus import train_tokenizer
from hydrajax.train.data.encode import encode_conversations
from hydrajax.train.data.packing import Document
from hydrajax.train.data.preview import preview

QUESTION, ANSWER = "How many [b]ears[/b] are there?", "Two: naïve\n  ones."
EXPECTED = f"{QUESTION}\n⟦{ANSWER}<|endoftext|>⟧{QUESTION}\n⟦{ANSWER}<|endoftext|>⟧"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([QUESTION, ANSWER], 300)


@pytest.fixture(scope="module")
def document(tokenizer):
    turns = (DialogueTurn("user", QUESTION), DialogueTurn("assistant", ANSWER))
    return encode_conversations(tokenizer, [Conversation(turns * 2, "f")], "plain")[0][0]


def test_brackets_around_what_is_learnt(document, tokenizer):
    assert preview(document, tokenizer, color=False).plain == EXPECTED
    unmarked = Document(document.ids, document.targets & False)
    assert preview(unmarked, tokenizer, color=False).plain == EXPECTED.replace("⟦", "").replace("⟧", "")


def test_colours_on_a_terminal_brackets_elsewhere(document, tokenizer):
    colored = preview(document, tokenizer)
    assert colored.plain == EXPECTED.replace("⟦", "").replace("⟧", "")  # [b] is text here and no markup
    targets = [colored.plain[span.start : span.end] for span in colored.spans if "green" in str(span.style)]
    assert targets == [ANSWER + "<|endoftext|>"] * 2
    console = Console(file=io.StringIO(), width=200)
    assert not console.is_terminal
    console.print(preview(document, tokenizer, color=console.is_terminal))
    assert console.file.getvalue() == EXPECTED + "\n"


def test_spaces_between_runs_survive_a_decoder_that_drops_leading_ones():
    """Decoders of SentencePiece vocabularies drop them."""

    class Tokenizer:
        def decode(self, ids, **_):
            return "".join([" a", " b", " c"][token] for token in ids).removeprefix(" ")

    document = Document(np.array([0, 1, 2]), np.array([False, True, False]))
    assert preview(document, Tokenizer(), color=False).plain == "a⟦ b⟧ c"
