"""Recordings of official code of drafts of one pass, and the drafts that they were made with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from helpers.recordings import need
from hydrajax import load
from hydrajax.language_model import LanguageModel

DRAFT_OF = {"ddtree": "dflash", "ddtree_ds": "dsdflash"}


@cache
def loaded_draft(folder: Path, name: str) -> LanguageModel:
    """Return the base and the draft of a recording such as ``ddtree_a``."""
    kind, _, base = name.rpartition("_")
    draft = folder / f"{DRAFT_OF.get(kind, kind)}_{base}" / "draft"
    need(draft / "config.json")
    return load(folder / f"base_{base}", draft)
