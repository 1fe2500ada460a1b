"""Prompts for the bundled model: Python source files of this installation that it was not trained on."""

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax import assets


@dataclass(frozen=True)
class NamedPrompt:
    """Token ids and their source."""

    name: str
    ids: list[int]


def held_out_files(folders: Mapping[str, Path] | None = None) -> Iterator[tuple[str, str]]:
    """Yield ``(name, text)`` of the held-out files that these folders contain.

    Args:
        folders: directory by source (the first part of a name); default: those of this Python.
    """
    if folders is None:
        paths = sysconfig.get_paths()
        folders = {"standard_library": Path(paths["stdlib"]), "packages": Path(paths["purelib"])}
    for full_name in assets.about().get("held_out", []):
        source, _, name = full_name.partition("/")
        if source not in folders:
            continue
        try:
            yield name, (folders[source] / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def held_out_prompts(files: Iterable[tuple[str, str]], tokenizer: Any, n_tokens: int) -> Iterator[NamedPrompt]:
    """Yield ``n_tokens`` tokens from the first function in the second half of each file that is long enough."""
    for name, text in files:
        lines = text.splitlines(keepends=True)
        starts = (n for n, line in enumerate(lines) if n >= len(lines) // 2 and line.lstrip().startswith("def "))
        start = next(starts, len(lines))
        ids = tokenizer.encode("".join(lines[start : start + n_tokens]), verbose=False)[:n_tokens]
        if len(ids) == n_tokens:
            yield NamedPrompt(f"{name}, line {start + 1}", ids)
