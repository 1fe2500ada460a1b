"""The shipped model: a small LLaMA with its tokenizer, and Medusa, Hydra and Hydra++ heads for it.

Trained on the source of Python's standard library; ``ABOUT.json`` names version, licence and what was held out. All in
released layouts, in bfloat16: `hydrajax.load(assets.base(), assets.path("hydra_pp"))`.
"""

from __future__ import annotations

import json
from pathlib import Path

from hydrajax.errors import HydrajaxError

FOLDER = Path(__file__).parent
DRAFTERS = ("medusa", "hydra", "hydra_pp")
NAMES = ("base", *DRAFTERS)


def path(name: str) -> Path:
    """The directory of one of `NAMES`, for ``--base`` or ``--draft``. Raises `HydrajaxError` where it is missing."""
    if name not in NAMES:
        raise HydrajaxError(f"assets: found '{name}', shipped are {', '.join(NAMES)}")
    return _present(name)


def base() -> Path:
    """The directory of the shipped base and its tokenizer."""
    return path("base")


def about() -> dict:
    """``ABOUT.json``: data, ``python`` (its version), ``licence``, and the list ``held_out`` of files never trained on.

    Held-out names are paths below the standard library's folder, such as ``"email/message.py"``.
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
