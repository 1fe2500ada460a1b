"""The tokenizer of a model's directory, and text from token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import check_directory


def load_tokenizer(directory: str | Path, field: str = "base") -> Any | None:
    """The transformers tokenizer of a Hugging Face directory, or None where it has none.

    Code from the directory is never run. Raises `HydrajaxError` for a damaged tokenizer; ``field`` is the option or
    setting that named the directory.
    """
    directory = Path(directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    check_directory(directory, field)
    from transformers import AutoTokenizer  # slow to import, and a prompt of ids needs none

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many types for a damaged tokenizer
        raise HydrajaxError(f"{field}: cannot read the tokenizer in {directory}: {one_line(error)}") from None


def run_tokenizer(call: Callable, *args, where: str = "", **settings) -> Any:
    """``call(...)``, with whatever the tokenizer's files make it raise as a `HydrajaxError` that ``where`` begins."""
    try:
        return call(*args, **settings)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library, as of a pattern without end, is no Exception
        raise HydrajaxError(f"{where}the tokenizer failed: {one_line(error)}") from None


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Token ids as text, without special tokens and with no space removed."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def visible(tokenizer: Any | None, token: int) -> str:
    """One token as text on one line, its spaces and line ends made visible; its id where there is no tokenizer.

    ``∅`` is a token without text, and -1, which is no token.
    """
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False) if token >= 0 else ""
    return repr(text)[1:-1].replace(" ", "·") or "∅"


def token_ids(tokenizer: Any) -> dict[str, int]:
    """The map from tokens to ids of a tokenizer that was loaded from a directory, added tokens included.

    From its ``tokenizer.json`` where there is one: transformers adds tokens that a model's family has by default and
    that the file does not hold.
    """
    file = Path(tokenizer.name_or_path or "") / "tokenizer.json"
    if not file.is_file():
        return tokenizer.get_vocab()
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)


def difference(ours: Mapping[str, int], theirs: Mapping[str, int], we: str, they: str) -> str | None:
    """The first token, by id, that two maps from tokens to ids do not agree about, in words; None where they agree."""
    different = ours.items() ^ theirs.items()
    if not different:
        return None
    token = min(different, key=lambda item: (item[1], item[0] not in ours or ours[item[0]] != item[1], item[0]))[0]
    said = [
        f"id {ids[token]} in {who}" if token in ids else f"none in {who}" for ids, who in ((ours, we), (theirs, they))
    ]
    return f"{token!r} has {said[0]} and {said[1]}"
