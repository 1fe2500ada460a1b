"""Text and bytes of tokens that follow a prompt. Many tokenizers drop the space before the first word of a text."""

import codecs
import functools
from collections.abc import Sequence
from typing import Any

from hydrajax.text.tokenizer import decode_text

INCOMPLETE = "\ufffd"  # decoders write it for a character with missing bytes
EACH_BYTE = "hydrajax.each_byte"  # decoders of byte tokens replace every invalid byte
codecs.register_error(EACH_BYTE, lambda error: (INCOMPLETE * (error.end - error.start), error.end))
# Byte-level tokenizers write every byte as a printable character (GPT-2, Radford et al. 2019).
LETTERS = {chr(byte): byte for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
LETTERS |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*LETTERS.values()}))}


@functools.lru_cache(maxsize=8)
class TokenBytes(dict[int, bytes]):
    """The bytes that tokens add to a text after its first word, none for special tokens; ids without a tokenizer."""

    def __init__(self, tokenizer: Any | None):
        self.tokenizer, self.errors, self._word = tokenizer, "replace", 0
        if tokenizer is not None:
            every = range(len(tokenizer))
            self._word = next((token for token in every if decode_text(tokenizer, [token]).isalpha()), 0)
            self.errors = EACH_BYTE if any(name.startswith("<0x") for name in tokenizer.get_vocab()) else "replace"

    def after(self, before: list[int], token: int) -> str:
        """Return the text that the tokenizer decodes from a token after others."""
        return decode_text(self.tokenizer, [*before, token]).removeprefix(decode_text(self.tokenizer, before))

    def __missing__(self, token: int) -> bytes:
        text = self.after([self._word], token)
        data = text.encode()
        if INCOMPLETE in text:  # a part of a character, whose bytes are in its name
            name = self.tokenizer.convert_ids_to_tokens(int(token))
            if name.startswith("<0x"):
                data = bytes.fromhex(name[3:5])
            elif LETTERS.keys() >= set(name):
                data = bytes(LETTERS[letter] for letter in name)
        return self.setdefault(token, data)


class Continuation:
    """The tokens that follow a prompt, as text and as bytes. Without a tokenizer, ids are text.

    The text is that of prompt and tokens, without the prompt's. A character belongs to the token that completes it.

    Attributes:
        offset: characters that the tokens `read` so far complete.
        begun: bytes of a character that the last token leaves incomplete.
    """

    def __init__(self, tokenizer: Any | None, prompt: Sequence[int] | None):
        """``prompt``: token ids; None for an unknown prompt that ends with a word."""
        self._known, self.offset = TokenBytes(tokenizer), 0
        ids = () if tokenizer is None or prompt is None else prompt
        begins = prompt is not None and not any(self._known[token].strip() for token in ids)
        self._head = list(ids) if begins else None  # the tokens before the first word
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._known.errors)
        self._decoder.decode(b"".join(self._known[token] for token in ids[-8:]))  # for its last character
        self.begun = self._decoder.getstate()[0]
        self._shown = self.begun.decode(errors=self._known.errors)  # in the prompt's text, if no token completes it

    def text(self, ids: Sequence[int]) -> str:
        """Read tokens to the end, and return their text."""
        return "".join(map(self.read, ids)) + self.rest()

    def rest(self) -> str:
        """Return the text of a character that stays incomplete."""
        return self.begun.decode(errors=self._known.errors).removeprefix(self._shown)

    def data(self, token: int) -> bytes:
        """Return the bytes of a token that comes next. Those of all tokens join to the text."""
        if self._head is None:
            return self._known[token]
        text = self._known.after(self._head, token)
        return self._known[token] if INCOMPLETE in text else text.encode()

    def name(self, token: int) -> str:
        """Return a token that comes next as text; parts of characters as OpenAI does, ``bytes:\\xf0``."""
        if not (data := self.data(token)):
            return self._known.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        text = data.decode(errors="backslashreplace")
        return text if text.encode() == data else f"bytes:{text}"

    def read(self, token: int) -> str:
        """Move on after a token, and return the characters that it completes."""
        if text := self._decoder.decode(self.data(token)):
            text, self._shown = text.removeprefix(self._shown), ""
        self.offset, self.begun = self.offset + len(text), self._decoder.getstate()[0]
        if self._head is not None:
            self._head = None if self._known[token].strip() else [*self._head, token]
        return text


def visible(tokenizer: Any | None, token: int) -> str:
    """Return one token on one line, ``∅`` for one without text and for -1; its id without a tokenizer."""
    if tokenizer is None:
        return str(token)
    name = "" if token < 0 else Continuation(tokenizer, None).name(token)
    return repr(name)[1:-1].replace(" ", "·") or "∅"
