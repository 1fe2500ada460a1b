"""Text and bytes of tokens that follow a prompt. Many tokenizers drop the space before the first word of a text."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import Any

from hydrajax.text.tokenizer import decode_text

INCOMPLETE = "\ufffd"  # decoders write it for a character with missing bytes
EACH_BYTE = "hydrajax.each_byte"  # decoders of byte tokens replace every invalid byte
codecs.register_error(EACH_BYTE, lambda error: (INCOMPLETE * (error.end - error.start), error.end))
# Byte-level tokenizers write every byte as a printable character (GPT-2, Radford et al. 2019).
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}


@functools.lru_cache(maxsize=8)
class TokenBytes(dict[int, bytes]):
    """The bytes that tokens add to a text after its first word, none for special tokens. Ids are text for None."""

    def __init__(self, tokenizer: Any | None):
        self.tokenizer, self.errors, self._word = tokenizer, "replace", 0
        if tokenizer is not None:
            self._word = next((token for token in range(len(tokenizer)) if self.decode([token]).isalpha()), 0)
            self.errors = EACH_BYTE if "<0x00>" in tokenizer.get_vocab() else "replace"

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self.tokenizer is None else decode_text(self.tokenizer, ids)

    def __missing__(self, token: int) -> bytes:
        text = self.decode([self._word, token]).removeprefix(self.decode([self._word]))
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
    """

    def __init__(self, tokenizer: Any | None, prompt: Sequence[int] | None):
        """``prompt``: token ids; None for an unknown prompt that ends with a word."""
        self._known, self.offset = TokenBytes(tokenizer), 0
        ids = () if tokenizer is None or prompt is None else prompt
        self._starts = prompt is not None and not any(self._known[token] for token in ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._known.errors)
        self._decoder.decode(b"".join(self._known[token] for token in ids[-8:]))  # for its last character
        self._shown = self.begun.decode(errors=self._known.errors)  # in the prompt's text, if no token completes it

    @property
    def begun(self) -> bytes:
        """The bytes of the character that the last token leaves incomplete."""
        return self._decoder.getstate()[0]

    def text(self, ids: Sequence[int]) -> str:
        """Read tokens to the end, and return their text."""
        return "".join(map(self.read, ids)) + self.rest()

    def rest(self) -> str:
        """Return the text of a character that stays incomplete."""
        return self.begun.decode(errors=self._known.errors).removeprefix(self._shown)

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token that comes next. Those of all tokens join to the text."""
        text = self._known.decode([token]) if self._starts else INCOMPLETE
        return self._known[token] if INCOMPLETE in text else text.encode()

    def name(self, token: int, mark: str = "") -> str:
        """Return a token that comes next as text: parts of characters as ``mark`` and ``\\xf0``."""
        if not (data := self.bytes(token)):
            return self._known.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        text = data.decode(errors="backslashreplace")
        return text if text.encode() == data else mark + text

    def read(self, token: int) -> str:
        """Move on after a token, and return the characters that it completes."""
        if text := self._decoder.decode(self.bytes(token)):
            text, self._shown = text.removeprefix(self._shown), ""
        self._starts, self.offset = self._starts and not self._known[token], self.offset + len(text)
        return text


def visible(tokenizer: Any | None, token: int) -> str:
    """Return one token on one line, with visible spaces and line breaks; its id without a tokenizer.

    ``∅`` stands for a token without text, and for -1, which is not a token.
    """
    if tokenizer is None:
        return str(token)
    name = "" if token < 0 else Continuation(tokenizer, None).name(token)
    return repr(name)[1:-1].replace(" ", "·") or "∅"
