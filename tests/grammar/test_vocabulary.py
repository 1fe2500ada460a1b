"""The bytes of every token as llguidance reads them, against tables computed from each tokenizer's own form."""

import json
import re

import numpy as np
import pytest

from helpers import small_tokenizer
from hydrajax import assets
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.grammar import Grammar
from hydrajax.grammar.vocabulary import vocabulary_of
from hydrajax.text.continuation import TokenBytes

PADDING = 20  # ids of a base beyond its tokenizer's


def of_sentencepiece(token: str) -> bytes:
    """Return the bytes of a piece: ``▁`` is a space and ``<0x41>`` a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def with_added_tokens():
    """Return the byte-level tokenizer with a special token and with added tokens that are ordinary text."""
    from tokenizers import AddedToken

    found = small_tokenizer.byte_level()
    found.add_tokens([AddedToken("    ", normalized=False), AddedToken("naïve→", normalized=False)])
    found.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    return found


def shipped():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets.base())


TOKENIZERS = {
    "byte level": (small_tokenizer.byte_level, small_tokenizer.bytes_of),
    "added tokens": (with_added_tokens, small_tokenizer.bytes_of),
    "metaspace": (small_tokenizer.metaspace, of_sentencepiece),
    "shipped": (shipped, small_tokenizer.bytes_of),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def made(request):
    """A tokenizer, the bytes of its ordinary tokens by id, its special ids, and llguidance's vocabulary."""
    make, bytes_of = TOKENIZERS[request.param]
    tokenizer = make()
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special}
    expected = {
        number: added[number].content.encode() if number in added else bytes_of(token)
        for token, number in tokenizer.get_vocab().items()
        if number not in special
    }
    vocabulary = vocabulary_of(tokenizer, len(tokenizer) + PADDING, (tokenizer.eos_token_id,))
    return tokenizer, expected, special, vocabulary


def test_bytes_of_every_token(made):
    tokenizer, expected, special, vocabulary = made
    assert len(expected) + len(special) == len(tokenizer)
    assert vocabulary.vocab_size == len(tokenizer) + PADDING
    # llguidance marks special tokens with byte 0xFF, which occurs in no text: the token of that byte alone is empty.
    marker = {number for number, token in expected.items() if token == b"\xff"}
    found = {number: vocabulary.decode_bytes([number]) for number in expected}
    assert found == expected | dict.fromkeys(marker, b"")
    found = {number: TokenBytes(tokenizer)[number] for number in range(len(tokenizer))}
    assert found == expected | dict.fromkeys(special, b"")
    found = {number for number in range(len(tokenizer)) if vocabulary.is_special_token(number)}
    assert found - marker == special
    assert vocabulary.eos_tokens == [tokenizer.eos_token_id]


def test_any_text_allows_all_ordinary_tokens_that_are_whole_characters_and_nothing_else(made):
    """Special tokens and ids beyond the tokenizer's never belong to a text."""
    tokenizer, expected, _, vocabulary = made
    allowed = allowed_at_start(r"(?s:.)+", tokenizer, vocabulary)
    whole = {number for number, token in expected.items() if is_utf8(token)}
    assert whole <= allowed <= expected.keys()
    partial = allowed - whole  # the first bytes of a character
    assert all(begins_utf8(expected[number]) for number in partial)
    assert partial == {number for number, token in expected.items() if begins_utf8(token)} - whole


def test_the_name_of_a_special_token_is_ordinary_text(made):
    """Also where the grammar leaves one text: the tokens that the grammar forces spell the name."""
    tokenizer, expected, special, vocabulary = made
    text = f"t {tokenizer.convert_ids_to_tokens(min(special))} re"
    matcher = Grammar.choices([text]).start(tokenizer, vocabulary.vocab_size, (tokenizer.eos_token_id,))
    *forced, last = matcher.forced(50)
    assert last == tokenizer.eos_token_id
    assert b"".join(expected.get(number, b"special") for number in forced) == text.encode()


def unigram():
    """Return a tokenizer of SentencePiece's kind, whose model has the names of its special tokens as likely pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [(f"<0x{byte:02X}>", -12.0) for byte in range(256)] + [(letter, -4.0) for letter in "▁</s>think"]
    model = models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces], unk_id=0, byte_fallback=True)
    tokens = Tokenizer(model)
    tokens.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokens.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_a_text_may_contain_the_name_of_any_added_token():
    """It is spelled with tokens that decoding leaves in the text, also if a normalizer changes it."""
    for make in [small_tokenizer.byte_level, small_tokenizer.metaspace, unigram]:
        from tokenizers import AddedToken

        tokenizer = make()
        tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<b c>", lstrip=True, rstrip=True)])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "[INST]", "system"]})
        names = ["cafe\u0301", *(token.content for token in tokenizer.added_tokens_decoder.values())]
        for name in names:
            text = f"a {name} b{name}"
            for grammar, expected in (
                (Grammar.choices([text]), text),
                (Grammar.json_schema({"const": {name: [text]}}), json.dumps({name: [text]}, ensure_ascii=False)),
                (Grammar.json_schema({"pattern": f"^{re.escape(text)}$", "type": "string"}), f'"{text}"'),
            ):
                matcher, ids = grammar.start(tokenizer, len(tokenizer), (tokenizer.eos_token_id,)), []
                while not ids or ids[-1] != tokenizer.eos_token_id:
                    ids += matcher.forced(8)[:1]
                    matcher.follow(ids)
                    assert matcher.error is None, (name, matcher.error)
                assert tokenizer.decode(ids, skip_special_tokens=True) == expected


def allowed_at_start(pattern: str, tokenizer, vocabulary) -> set[int]:
    matcher = Grammar.regex(pattern).start(tokenizer, vocabulary.vocab_size, (tokenizer.eos_token_id,))
    mask = np.zeros((1, -(-vocabulary.vocab_size // 32)), np.uint32)
    matcher.allow(np.array([-1]), np.array([-1]), mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def is_utf8(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def begins_utf8(token: bytes) -> bool:
    """Return whether some bytes after the token complete a text."""
    try:
        token.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def test_bases_that_cannot_follow_a_grammar_are_refused_in_one_line():
    for tokenizer, eos_ids, message in [
        (None, (2,), "grammar: requires a tokenizer, which the base does not have"),
        ("fast", (), "grammar: requires an end-of-sequence token, which the base does not have"),
        ("slow", (2,), "grammar: the base's tokenizer cannot be used (Only fast tokenizers are supported)"),
    ]:
        made = {"fast": small_tokenizer.byte_level, "slow": object}.get(tokenizer, lambda: None)()
        with pytest.raises(HydrajaxError) as error:
            Grammar.regex("a").start(made, 320, eos_ids)
        assert str(error.value) == message


def test_a_vocabulary_is_read_once():
    tokenizer = small_tokenizer.byte_level()
    first, again = (vocabulary_of(tokenizer, 320, (2,)) for _ in range(2))
    assert first is again
