"""Tokenizers of GGUF files: read the vocabulary and its flags as llama.cpp does (its ``src/llama-vocab.cpp``)."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import unsupported

# The models' own expressions that split text. llama.cpp simplifies the letters of Tekken's.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{END}"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|\p{{N}}|{END}".replace(r"[\r\n]*", r"[\r\n/]*")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
# These add <s> to a text by default, and a word that is a token needs no merges.
ADDING = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
SPLITS = {  # the values of tokenizer.ggml.pre, by the expressions that split a text one after the other
    (GPT2,): "gpt-2 phi-2 exaone4 gigachat mpt olmo jais trillion",
    (r"\p{N}", GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    (LLAMA3,): f"{ADDING} dbrx smaug-bpe",
    (QWEN2,): "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan",
    (TEKKEN,): "tekken",
}
KNOWN_SPLITS = {name: expressions for expressions, names in SPLITS.items() for name in names.split()}
LIKE_LLAMA3 = {*ADDING.split(), "tekken"}
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens that are matched in text, as these are whatever their type:
ENDS = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s> <eos> <|eom_id|> <EOT>
[EOT] [EOS] <|end_of_text|> <end_of_utterance> <turn|> <｜end▁of▁sentence｜>"""
KEEPING = ("<unk>", "<s>", "<|endoftext|>")  # the marks of Phi-3 that do not take the white space after them
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_tokenizer(field: Callable[..., Any], special: Mapping[str, int | None], vocab_size: int) -> Any | None:
    """Build the transformers tokenizer; None for a file without a vocabulary.

    Args:
        field: ``field(key, type, *default)`` returns a value of the metadata.
        special: ids of special tokens by llama.cpp's names.

    Raises:
        Exception: the fields do not fit together.
    """
    kind = field("tokenizer.ggml.model", str, "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    if kind not in ("llama", "gpt2"):
        raise unsupported("tokenizer.ggml.model", kind, "'llama' or 'gpt2'")
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    splits = field("tokenizer.ggml.pre", str, "default") if kind == "gpt2" else ""
    prefix = kind == "llama" and field("tokenizer.ggml.add_space_prefix", bool, True)
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(field("tokenizer.ggml.tokens", list))]
    types = field("tokenizer.ggml.token_type", list, [1] * len(tokens))
    for name, i in {"tokens": len(tokens) - 1, **{f"{name}_token_id": i for name, i in special.items()}}.items():
        most = (vocab_size if name == "tokens" else len(tokens)) - 1
        if i is not None and i > most:
            raise HydrajaxError(f"tokenizer.ggml.{name}: got id {i}, expected at most {most}")
    # Gemma's tokens of many "▁" are written as spaces; they are matched after a text's spaces have become "▁".
    runs = {"▁" * len(token) for token in tokens if kind == "llama" and not prefix and not token.strip(" ")} - {*tokens}
    tokens = [token.replace(" ", "▁") if token.replace(" ", "▁") in runs else token for token in tokens]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise HydrajaxError(f"tokenizer.ggml.tokens: got {len(ids)} different tokens, expected {len(tokens)}")
    if kind == "llama":
        built = _sentencepiece(ids, field("tokenizer.ggml.scores", list), prefix)
    else:
        built = _byte_level(ids, field("tokenizer.ggml.merges", list), splits)
    strip = re.search("phi-?3", field("general.name", str, ""), re.IGNORECASE)
    marks = {
        token: AddedToken(
            token, special=type_ != USER_DEFINED, normalized=token in runs, rstrip=bool(strip) and token not in KEEPING
        )
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED) or token in ENDS.split()
    }
    built.add_tokens(list(marks.values()))
    adds = {"bos": kind == "llama" or splits in LIKE_LLAMA3, "eos": False}
    flags = {name: field(f"tokenizer.ggml.add_{name}_token", bool, default) for name, default in adds.items()}
    ends = {name: i for name, flag in flags.items() if flag and (i := special[name]) is not None}
    added = [{"id": name, "ids": [i], "tokens": [tokens[i]]} for name, i in ends.items()]
    single = [name for name in ("bos", "$A", "eos") if name in {"$A", *ends}]
    built.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=added)
    # transformers matches these in text: not a token of text, such as "!", with which LLaMA 3's files pad.
    some = {SPECIAL[name]: tokens[i] for name, i in special.items() if name in SPECIAL and i is not None}
    named = {name: marks[token] for name, token in some.items() if token in marks}
    template = field("tokenizer.chat_template", str, None)
    return PreTrainedTokenizerFast(tokenizer_object=built, chat_template=template, **named)


def _sentencepiece(ids: dict[str, int], scores: Sequence[float], prefix: bool) -> Any:
    """Return BPE with "▁" for spaces that joins the pair with the best score first.

    With ``prefix`` a space precedes the text, and the text after every mark.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    pairs = [
        (-scores[i], -at, (token[:at], token[at:]))  # the leftmost of equal pairs mostly has the longest first part
        for token, i in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    built = Tokenizer(models.BPE(ids, [pair for *_, pair in sorted(pairs)], byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    built.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return built


def _byte_level(ids: dict[str, int], merges: Sequence[str], splits: str) -> Any:
    """Return byte-level BPE; the rules for an unknown value of ``splits`` are those of files without it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    # The first part of a merge has at least one character, and the first of equal merges counts.
    pairs = dict.fromkeys((merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0)
    built = Tokenizer(models.BPE(ids, list(pairs), ignore_merges=splits in LIKE_LLAMA3))
    parts = [pre_tokenizers.Split(Regex(part), "isolated") for part in KNOWN_SPLITS.get(splits, DEFAULT)]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*parts, spelled])
    built.decoder = decoders.ByteLevel()
    return built
