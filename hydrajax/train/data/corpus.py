"""The standard library's source as training text, and a tokenizer trained on text."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.train.data.conversations import Text

END_OF_TEXT = "<|endoftext|>"

# Installed packages, tests, generated tables and generated documentation.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


def standard_library(max_chars: int, folder: str | Path | None = None, seed: int = 0) -> list[Text]:
    """Read Python files of the standard library in an order shuffled by ``seed``, up to ``max_chars`` in total.

    Names are paths in the library's folder, with forward slashes.

    ``folder`` replaces the running Python's library. Raises `HydrajaxError` if it has no source files (a zipped or
    frozen Python).
    """
    folder = Path(folder or sysconfig.get_paths()["stdlib"])
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # not entered: there can be many installed packages
        paths += [Path(parent, name).relative_to(folder).as_posix() for name in names if name.endswith(".py")]
    files = list(as_many_as_fit(sorted(paths), folder, max_chars, seed))
    if not files:
        raise HydrajaxError(f"standard library: found no Python source of up to {max_chars} characters in {folder}")
    return files


def as_many_as_fit(names: Sequence[str], folder: Path, max_chars: int, seed: int) -> Iterator[Text]:
    """Read files in ``folder`` in an order shuffled by ``seed`` until the next one would exceed ``max_chars`` in total.

    Files that are empty or not readable as UTF-8 are left out.
    """
    total = 0
    for index in np.random.default_rng(seed).permutation(len(names)):
        try:
            text = (folder / names[index]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a broken link, or one of the few old files in another encoding
        total += len(text)
        if total > max_chars:
            return
        if text:
            yield Text(names[index], text)


def train_tokenizer(texts: Sequence[str], vocab_size: int):
    """Train a byte-level BPE (a transformers ``PreTrainedTokenizerFast``); id 0 is `END_OF_TEXT`.

    Decoding the ids of a text returns it exactly. The vocabulary is smaller than ``vocab_size`` if the texts have too
    few pairs to merge. Raises `HydrajaxError` if ``vocab_size`` is less than 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast  # slow to import

    if vocab_size < 257:
        raise HydrajaxError(f"vocab_size: got {vocab_size}, expected at least 257 (256 bytes and end of text)")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # The clean-up would remove spaces before commas and dots, which code has.
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)
