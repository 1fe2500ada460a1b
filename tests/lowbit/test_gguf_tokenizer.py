"""Tokenizers of GGUF files: the ids of llama.cpp, and of the tokenizer from which a file was written.

The recorded ids are those of llama.cpp as in llama-cpp-python 0.3.36, with ``parse_special``.
"""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from helpers.gguf_files import write_gguf
from helpers.released import refusal
from helpers.small_tokenizer import SAMPLE
from hydrajax.formats.hub import resolve
from hydrajax.text.tokenizer import load_tokenizer

MERGES = ["Ġ Ġ", "1 2", "12 3", "123 4", "' s", "' S", "a b", "Ġ ab", "A b", "Ċ Ċ", "! Ċ", "! /", "Ġ 1", "Ã ©", "s ab"]
ADDED = ["Ġzephyr", "<|a|>", "<|b|>", "<｜c｜>", "<|d|>", "<|im_end|>", "<uk>", "!!"]
TYPES = [1, 3, 4, 3, 5, 1, 2, 1]  # of these
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), *ADDED]
TEXT = "A's 'S'sab Ab  12345 1\n\nx!/\n!\nzephyr zephyr<|a|> <|b|>é<｜c｜> <|d|> ab <|im_end|><uk> "
END = "<|a|> Ġ <|b|> Ã© <｜c｜> Ġ < | d | > Ġab Ġ <|im_end|> <uk> Ġ"
CASES = {  # by names: the beginning
    "gpt-2 mpt olmo jais trillion": "A 's Ġ ' S 's ab Ġ Ab Ġ Ġ 1234 5 Ġ1 Ċ Ċ x !/ Ċ ! Ċ z e p h y r Ġ z e p h y r",
    "smollm starcoder refact command-r codeshell exaone minerva-7b": (
        "A 's Ġ ' S 's ab Ġ Ab ĠĠ 1 2 3 4 5 Ġ 1 Ċ Ċ x !/ Ċ ! Ċ z e p h y r Ġ z e p h y r"
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": (
        "A 's Ġ ' S 's ab Ġ Ab Ġ Ġ 123 4 5 Ġ 1 ĊĊ x !/ Ċ !Ċ z e p h y r Ġzephyr"
    ),
    "dbrx smaug-bpe": "A 's Ġ ' S 's ab Ġ Ab Ġ Ġ 123 4 5 Ġ 1 ĊĊ x !/ Ċ !Ċ z e p h y r Ġ z e p h y r",
    "qwen2 deepseek-r1-qwen megrez": "A 's Ġ ' S 's ab Ġ Ab Ġ Ġ 1 2 3 4 5 Ġ 1 ĊĊ x !/ Ċ !Ċ z e p h y r Ġ z e p h y r",
    "tekken": "A 's Ġ ' S 's ab Ġ Ab Ġ Ġ 1 2 3 4 5 Ġ 1 ĊĊ x !/ Ċ !Ċ z e p h y r Ġzephyr",
    "default": "A ' s Ġ ' S ' sab Ġ Ab Ġ Ġ 123 4 5 Ġ 1 Ċ Ċ x !/ Ċ ! Ċ z e p h y r Ġ z e p h y r",
}
PIECES = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
PIECES |= dict.fromkeys(["▁▁", "th", "▁th", "▁the", "ee", "▁t", "ree", "▁tree", *"▁ther"], 1)
PIECES |= {"<|a|>": 3, "<|b|>": 4, "<|c|>": 5, "<|im_end|>": 1, "   ": 4}
BYTES = "<0x3C> <0x7C> <0x63> <0x7C> <0x3E>"  # of <|c|>
NO_PREFIX = {"add_space_prefix": False}
ENDS = {"add_space_prefix": True, "add_bos_token": False, "add_eos_token": True, "remove_extra_whitespaces": True}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path):
    """``tokenizer(rows=None, **fields)``: the one that is loaded from a file with these fields."""

    def load(rows=None, name="tiny", **fields):
        size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=rows or len(fields["tokens"]), **size))
        fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | {"general.name": name}
        return load_tokenizer(resolve(write_gguf(tmp_path / "tiny.gguf", model, fields=fields), "base"))

    return load


def byte_level(pre: str, **more) -> dict:
    ids = {"bos_token_id": TOKENS.index("<|b|>"), "eos_token_id": TOKENS.index("<|a|>")}
    ids["padding_token_id"] = TOKENS.index("!!")
    types = [1] * (len(TOKENS) - len(ADDED)) + TYPES
    fields = {"model": "gpt2", "pre": pre, "tokens": TOKENS, "token_type": types, "merges": [*MERGES, MERGES[0]]}
    return fields | ids | more


def sentencepiece(**more) -> dict:
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) - 259)]
    return {"model": "llama", "tokens": [*PIECES], "token_type": [*PIECES.values()], "scores": scores} | more


def tokens_of(tokenizer, text: str, **options) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options)))


@pytest.mark.filterwarnings("ignore:hydrajax. tokenizer.ggml.pre. got 'default'")
@pytest.mark.parametrize("names", CASES)
def test_byte_level_vocabularies(tokenizer, names):
    for name in names.split():
        ours = tokenizer(**byte_level(name))
        assert tokens_of(ours, TEXT, add_special_tokens=False) == f"{CASES[names]} {END}"
        assert ours.decode(ours.encode(TEXT, add_special_tokens=False)) == TEXT
        assert ours.pad_token is None  # else "!!" would be matched in text, and left out of decoded text


@pytest.mark.parametrize("kind", ["llama3", "tekken", "qwen2"])
def test_the_tokenizer_that_was_written(tokenizer, kind):
    """With transformers' expression, on texts that llama.cpp's version of Tekken's splits otherwise."""
    ids, merges = {token: i for i, token in enumerate(TOKENS)}, [tuple(merge.split(" ")) for merge in MERGES]
    theirs = Tokenizer(models.BPE(ids, merges, ignore_merges=kind != "qwen2"))
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[kind]), "isolated")
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    ours = tokenizer(**byte_level(kind))
    for text in (*SAMPLE, "ÀÉab e\u0301A'S", "ab12345 '\n \n  zephyr zephyr\t!/\n1 ²½ naïveАбВ"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids


def test_tokens_that_are_added(tokenizer):
    both = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    for pre, flags, expected in (
        ("llama-bpe", {}, "<|b|> ab"),
        ("llama-bpe", {"add_bos_token": False}, "ab"),
        ("llama-bpe", {"bos_token_id": None}, "ab"),
        ("qwen2", {}, "ab"),
        ("qwen2", both, "<|b|> ab <|a|>"),
    ):
        assert tokens_of(tokenizer(**byte_level(pre, **flags)), "ab") == expected


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ({}, "<s> ▁▁ th e </s> ▁tree", f"<s> ▁the r <|a|> ▁▁ ▁the <|b|> ▁the ▁ {BYTES} <|im_end|> ▁the"),
        (NO_PREFIX, "<s> ▁the </s> t ree", f"<s> th e r <|a|> ▁▁ th e <|b|> th e ▁ {BYTES} <|im_end|> th e"),
        (ENDS, "▁▁ th e </s> ▁tree </s>", f"▁the r <|a|> ▁▁ ▁the <|b|> ▁the ▁ {BYTES} <|im_end|> ▁the </s>"),
        ({"name": "Phi-3"}, "<s> ▁▁ th e </s> ▁tree", f"<s> ▁the r <|a|> ▁the <|b|> ▁the ▁ {BYTES} <|im_end|> ▁the"),
    ],
)
def test_sentencepiece_vocabularies(tokenizer, flags, first, second):
    """Spaces before texts and after marks, by score, and bytes; beginning and end are tokens 1 and 2 by default."""
    ours = tokenizer(**sentencepiece(**flags))
    assert tokens_of(ours, " the</s>tree") == first
    text = "ther<|a|>  the<|b|>the <|c|><|im_end|>the"
    assert tokens_of(ours, text) == second
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True).replace(" ", "") == "therthe<|b|>the<|c|>the"


def test_runs_of_spaces_that_are_user_defined(tokenizer):
    """As in Gemma's files; the tokenizer names them as Gemma's own does."""
    for prefix, run, rest in ((True, "   ", ["▁▁", "▁the"]), (False, "▁▁▁", ["▁▁", "th", "e"])):
        ours = tokenizer(**sentencepiece(add_space_prefix=prefix))
        ids = ours.encode("a     the", add_special_tokens=False)
        found = [ours.convert_ids_to_tokens(i) for i in ids if i != ours.convert_tokens_to_ids("▁")]
        assert found == ["<0x61>", run, *rest]


REFUSED = [
    (byte_level("qwen2", rows=270), f"tokens: got id {len(TOKENS) - 1}, expected at most 269"),
    (byte_level("qwen2", eot_token_id=999), f"eot_token_id: got id 999, expected at most {len(TOKENS) - 1}"),
    (byte_level("qwen2", tokens=[*TOKENS[:-1], "!"]), f"tokens: got {len(TOKENS) - 1} different tokens, expected"),
    (byte_level("qwen2", merges=["a nope"]), "cannot read the tokenizer: Error while initializing BPE"),
    (byte_level("qwen2", merges=None), "field 'tokenizer.ggml.merges' is missing"),
    (byte_level("qwen2", token_type=[1]), "cannot read the tokenizer: zip"),
    (sentencepiece(scores=None), "field 'tokenizer.ggml.scores' is missing"),
    (sentencepiece(model="t5"), "tokenizer.ggml.model: got 't5', expected 'llama' or 'gpt2'"),
]


def test_vocabularies_that_are_refused(tokenizer):
    for fields, message in REFUSED:
        refusal(lambda fields=fields: tokenizer(**fields), "tiny.gguf: ", message)
