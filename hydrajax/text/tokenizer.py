"""Load a tokenizer, decode token ids, and compare vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import check_directory

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # two names of one class of transformers


def load_tokenizer(directory: str | Path, field: str = "base") -> Any | None:
    """Load the transformers tokenizer of a Hugging Face directory; never runs code from it.

    Args:
        directory: of the model.
        field: the option or setting that named it, for messages.

    Returns:
        The tokenizer, or None if the directory has none.

    Raises:
        HydrajaxError: for a damaged tokenizer.
    """
    directory = Path(directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    check_directory(directory, field)
    # Slow to import, and prompts of ids need none. AutoTokenizer imports torch where it is installed.
    if _names_a_generic_class(directory):
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer

    try:
        return Tokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many types for a damaged tokenizer
        raise HydrajaxError(f"{field}: cannot read the tokenizer in {directory}: {one_line(error)}") from None


def _names_a_generic_class(directory: Path) -> bool:
    """Return whether ``tokenizer.json`` is all that there is to the tokenizer."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    named = isinstance(config, dict) and config.get("tokenizer_class") in GENERIC and "auto_map" not in config
    return named and (directory / "tokenizer.json").is_file()


def run_tokenizer(call: Callable, *args, where: str = "", **settings) -> Any:
    """Call a tokenizer and raise any error as a `HydrajaxError`; ``where`` is the start of the message."""
    try:
        return call(*args, **settings)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of the tokenizers library are not Exceptions
        raise HydrajaxError(f"{where}the tokenizer failed: {one_line(error)}") from None


def decode_text(tokenizer: Any | None, ids: Sequence[int]) -> str:
    """Return a text's token ids as text, without special tokens; without a tokenizer, the ids."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Return the map from tokens to ids of a tokenizer loaded from a directory, added tokens included.

    It is read from ``tokenizer.json`` if there is one, since transformers adds default tokens that the file lacks.
    """
    file = Path(tokenizer.name_or_path or "") / "tokenizer.json"
    if not file.is_file():
        return tokenizer.get_vocab()
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)


def difference(ours: Mapping[str, int], theirs: Mapping[str, int], we: str, they: str) -> str | None:
    """Describe the first token, by id, that differs between two maps from tokens to ids; None if they are equal."""
    different = ours.items() ^ theirs.items()
    if not different:
        return None
    token = min(different, key=lambda item: (item[1], item[0] not in ours or ours[item[0]] != item[1], item[0]))[0]
    described = [
        f"id {ids[token]} in {who}" if token in ids else f"no id in {who}" for ids, who in ((ours, we), (theirs, they))
    ]
    return f"{token!r} has {described[0]} and {described[1]}"
