"""Load a tokenizer, decode token ids, and compare vocabularies."""

import contextlib
import json
import os
import re
import string
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import check_directory

_STDERR = threading.RLock()
# Texts that a damaged tokenizer may panic at: letters, digits, punctuation, spaces, characters of one to four bytes.
TRIED = ("a", "the tree", f"{string.printable}é日🙂")
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # two names of one class of transformers


def load_tokenizer(directory: str | Path, field: str = "base") -> Any | None:
    """Load the transformers tokenizer of a Hugging Face directory; never runs code from it.

    Returns:
        The tokenizer, or None if the directory has none.
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

    with without_panic_text():
        failed = f"cannot read the tokenizer in {directory}"
        return run_tokenizer(_read_and_try, Tokenizer, directory, where=f"{field}: ", failed=failed)


def _read_and_try(kind: Any, directory: Path) -> Any:
    """Read a tokenizer; a damaged one may panic only when it is used."""
    _check_merges(directory / "tokenizer.json")
    tokenizer = kind.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    for text in TRIED:
        with contextlib.suppress(Exception):  # prompts of ids need no text; some tokenizers are not the library's
            ids = tokenizer.backend_tokenizer.encode(text).ids
            for some in (ids, *([i] for i in ids)):
                tokenizer.backend_tokenizer.decode(some)
    return tokenizer


def _check_merges(file: Path) -> None:
    """Refuse merges without the prefix that the library cuts off: it ends the process if that fails."""
    text = file.read_bytes() if file.is_file() else b""
    if re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', text):
        model = json.loads(text)["model"]
        prefix = model.get("continuing_subword_prefix") or ""
        for merge in model.get("merges") or ():
            second = (merge.split(" ") if isinstance(merge, str) else merge)[1]
            if not second.startswith(prefix):
                raise ValueError(f"continuing_subword_prefix: got {prefix!r}, expected a start of {second!r}")


def _names_a_generic_class(directory: Path) -> bool:
    """Return whether ``tokenizer.json`` is all that there is to the tokenizer."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    named = isinstance(config, dict) and config.get("tokenizer_class") in GENERIC and "auto_map" not in config
    return named and (directory / "tokenizer.json").is_file()


def run_tokenizer(call: Callable, *args, where: str = "", failed: str = "the tokenizer failed", **settings) -> Any:
    """Call a tokenizer and raise any error as a `HydrajaxError`: ``where``, ``failed`` and the reason."""
    try:
        return call(*args, **settings)
    except (KeyboardInterrupt, SystemExit, HydrajaxError):
        raise
    except BaseException as error:  # panics of the tokenizers library are not Exceptions
        raise HydrajaxError(f"{where}{failed}: {one_line(error)}") from None


@contextlib.contextmanager
def without_panic_text() -> Iterator[None]:
    """Leave out the text that Rust prints to stderr for a panic, which becomes an exception as well.

    Other text that any thread writes meanwhile appears at the end.
    """
    with _STDERR, contextlib.ExitStack() as stack:
        try:
            kept = stack.enter_context(os.fdopen(os.dup(2), "wb"))
            written = stack.enter_context(tempfile.TemporaryFile())
            os.dup2(written.fileno(), 2)
        except OSError:  # stderr is closed, or there is no folder for temporary files
            yield
            return
        try:
            yield
        finally:
            os.dup2(kept.fileno(), 2)
            written.seek(0)
            kept.write(re.sub(rb"\n?thread '[^\n]* panicked at .*", b"", written.read(), flags=re.DOTALL))


def decode_text(tokenizer: Any | None, ids: Sequence[int], special: bool = False) -> str:
    """Return a text's token ids as text, by default without special tokens; without a tokenizer, the ids."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Return the map from tokens to ids of a tokenizer loaded from a directory, added tokens included.

    It is read from ``tokenizer.json`` if there is one, since transformers adds default tokens that the file lacks.
    """
    file = Path(tokenizer.name_or_path or "") / "tokenizer.json"
    if not file.is_file():
        return tokenizer.get_vocab()
    from tokenizers import Tokenizer

    with without_panic_text():
        return run_tokenizer(Tokenizer.from_file, str(file)).get_vocab(with_added_tokens=True)


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
