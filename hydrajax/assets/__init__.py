"""The shipped model: a small LLaMA with its tokenizer, Medusa, Hydra and Hydra++ heads and a draft model for it.

Trained on Python source: the standard library's and that of the packages this one is installed and tested with.
``ABOUT.json`` names versions, licences and what was held out. `hydrajax.load("shipped", "hydra++")`.
"""

from __future__ import annotations

import json
from pathlib import Path

from hydrajax.errors import HydrajaxError

FOLDER = Path(__file__).parent
HEADS = ("medusa", "hydra", "hydra_pp")
DRAFTS = (*HEADS, "draft_model")
NAMES = ("base", *DRAFTS)
# As users name them, for ``base`` and for ``draft``.
SHIPPED_BASE = {"shipped": "base"}
SHIPPED_DRAFTS = {"medusa": "medusa", "hydra": "hydra", "hydra++": "hydra_pp", "draft-model": "draft_model"}


def path(name: str) -> Path:
    """The directory of one of `NAMES`, for ``--base`` or ``--draft``. Raises `HydrajaxError` where it is missing."""
    if name not in NAMES:
        raise HydrajaxError(f"assets: found '{name}', shipped are {', '.join(NAMES)}")
    return _present(name)


def base() -> Path:
    """The directory of the shipped base and its tokenizer."""
    return path("base")


def about() -> dict:
    """``ABOUT.json``: ``sources`` with their licences, and the list ``held_out`` of files that were never trained on.

    Held-out names begin with ``standard_library/`` or ``packages/``, the rest is a path below the standard library's or
    the installed packages' folder: ``"standard_library/email/message.py"``.
    """
    file = _present("ABOUT.json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HydrajaxError(f"assets: {file} is not JSON: {error}") from None


def _present(name: str) -> Path:
    if not (FOLDER / name).exists():
        raise HydrajaxError(f"assets: no {name} in {FOLDER}: the package is installed without its shipped model")
    return FOLDER / name
