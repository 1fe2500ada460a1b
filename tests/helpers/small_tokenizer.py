"""A small byte-level tokenizer, trained on demand."""

# Characters of one to four bytes, which tokens can split.
SAMPLE = ["the tree of the draft, the base of the tree", "naïve café Straße", "日本語のテキスト", "🙂🌳🌲 trees 🌳"]
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


# GPT-2's table of bytes as printable characters (Radford et al. 2019, `bytes_to_unicode`).
_KEPT = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_BYTES = {chr(byte): byte for byte in _KEPT}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _KEPT)}


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token of a byte-level tokenizer."""
    return bytes(_BYTES[letter] for letter in token)


def byte_level():
    """Return a byte-level BPE tokenizer with <unk>, <s>, </s> = 0, 1, 2; it adds <s> and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(SAMPLE, trainer)
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=True,  # as in many released tokenizers
        model_max_length=16,  # otherwise transformers warns about longer texts
    )


def metaspace():
    """Return a tokenizer as LLaMA 2's: BPE with metaspace and byte fallback, <unk>, <s>, </s> = 0, 1, 2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", "t", "r", "e", "h", "ß", "日", "▁t", "re", "tre", "▁the", "▁▁", "he", "▁tre", "▁{", '"', "{", "}"]
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "t"), ("r", "e"), ("h", "e"), ("▁t", "he"), ("t", "re"), ("▁", "▁"), ("▁t", "re"), ("▁", "{")]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokens = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
