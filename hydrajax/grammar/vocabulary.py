"""A base's vocabulary as llguidance reads it: the bytes of every token, and how text is tokenized."""

import functools
import json
from typing import Any

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.optional_deps import needs
from hydrajax.text.continuation import TokenBytes

START = "\x02"  # begins a text whose tokens do not depend on being the first ones


@functools.lru_cache(maxsize=4)  # half a second for 49,152 tokens
def vocabulary_of(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """Return the `llguidance.LLTokenizer` of a transformers tokenizer.

    Args:
        tokenizer: the base's; a fast one, whose Rust implementation llguidance reads.
        vocab_size: the base's. Ids beyond the tokenizer's are never allowed.
        eos_ids: the tokens that may follow a complete text.

    Raises:
        HydrajaxError: if llguidance is missing, and for a base without a fast tokenizer or without EOS.
    """
    try:
        import llguidance.hf
    except ImportError:
        raise HydrajaxError(f"grammar: {needs('llguidance')}") from None
    if tokenizer is None:
        raise HydrajaxError("grammar: requires a tokenizer, which the base does not have")
    if not eos_ids:
        raise HydrajaxError("grammar: requires an end-of-sequence token, which the base does not have")
    try:
        read = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
        plain = llguidance.TokenizerWrapper(_PlainTokenizer(tokenizer, read))
        return llguidance.LLTokenizer(plain, n_vocab=vocab_size, eos_token=list(eos_ids))
    except Exception as error:  # of several kinds
        raise HydrajaxError(f"grammar: the base's tokenizer cannot be used ({one_line(error, 120)})") from None


class _PlainTokenizer:
    """A tokenizer that reads the name of an added token as ordinary text, for `llguidance.TokenizerWrapper`.

    A forced text may contain such a name, for example a constant of a JSON schema. llguidance's own reading of the
    tokenizer would write it with the token: EOS in the middle of a string would end the output, and no text contains
    tokens that llguidance regards as special, among them all added ones like ``<think>``.

    Attributes:
        eos_token_id, bos_token_id, tokens, special_token_ids: as `llguidance.TokenizerWrapper` expects.
    """

    def __init__(self, tokenizer: Any, read: Any):
        import tokenizers

        every, named, added = range(read.vocab_size), len(tokenizer), tokenizer.added_tokens_decoder
        skipped = {token for token in added if added[token].special}
        self.special_token_ids = [t for t in every if read.is_special_token(t) or t in skipped or t >= named]
        form = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in form["added_tokens"]:
            token["special"] |= token["id"] in self.special_token_ids
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(form))
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True
        self._start, self._read, self._never = self._ids(START), read, frozenset(self.special_token_ids)
        self.eos_token_id, self.bos_token_id = read.eos_tokens[0], None
        known = TokenBytes(tokenizer)
        self.tokens = [known[token] or read.decode_bytes([token]) for token in every]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.encode() if isinstance(text, str) else text
        found = self._ids(START + text.decode())[len(self._start) :]
        # A normalizer changes texts, and the model's own vocabulary may have the name of a special token.
        spelled = b"".join(self.tokens[token] for token in found) == text and self._never.isdisjoint(found)
        return found if spelled else self._read.greedy_tokenize(text.decode())

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids
