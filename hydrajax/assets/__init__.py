"""The bundled model: a small LLaMA with its tokenizer, Medusa, Hydra and Hydra++ heads, and a draft model.

Trained on Python source: the standard library and the packages that hydrajax is installed and tested with.
``ABOUT.json`` lists versions, licences and the held-out files. Load with `hydrajax.load("shipped", "hydra++")`.

There are also drafts for the base ``smollm2`` (`hydrajax.formats.known_bases`), whose weights are not bundled.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from hydrajax.errors import HydrajaxError

FOLDER = Path(__file__).parent
HEADS = ("medusa", "hydra", "hydra_pp")
DRAFTS = (*HEADS, "draft_model")
# Users' names, for ``base`` and for ``draft``; a draft's name means the one for the base.
SHIPPED_BASE = {"shipped": "base"}
SHIPPED_DRAFTS = {"medusa": "medusa", "hydra": "hydra", "hydra++": "hydra_pp", "draft-model": "draft_model"}
SMOLLM2_DRAFTS = {"medusa": "smollm2_medusa", "hydra++": "smollm2_hydra_pp", "dspark": "smollm2_dspark"}
DRAFTS_OF = {"shipped": SHIPPED_DRAFTS, "smollm2": SMOLLM2_DRAFTS}
DRAFT_NAMES = tuple(dict.fromkeys(name for drafts in DRAFTS_OF.values() for name in drafts))
NAMES = ("base", *DRAFTS, *SMOLLM2_DRAFTS.values())


def path(name: str) -> Path:
    """Return the directory of one of `NAMES`, for ``--base`` or ``--draft``."""
    if name not in NAMES:
        raise HydrajaxError(f"assets: got '{name}', expected one of {', '.join(NAMES)}")
    return _present(name)


def base() -> Path:
    """Return the directory of the bundled base and its tokenizer."""
    return path("base")


def drafts_of(base: str | Path) -> list[str]:
    """Return the names of the bundled drafts of a base, which is given by name; empty for any other base."""
    return list(DRAFTS_OF.get(str(base), {}))


def draft(name: str, shapes: Mapping[str, int] | None) -> Path:
    """Return the directory of a bundled draft.

    Args:
        name: one of `DRAFT_NAMES`.
        shapes: the base's, as heads record them (`hydrajax.formats.fingerprint.shapes_of`). Without a bundled draft for
            such a base, or if None, the draft is the first of this name, that of the shipped base if there is one.
    """
    folders = [drafts[name] for drafts in DRAFTS_OF.values() if name in drafts]
    fitting = (folder for folder in folders if shapes is not None and _recorded_shapes(folder) == shapes)
    return path(next(fitting, folders[0]))


def _recorded_shapes(folder: str) -> dict | None:
    """Return the shapes of the base that a bundled draft records; None without a record or without the draft."""
    file = FOLDER / folder / "config.json"
    record = json.loads(file.read_text(encoding="utf-8")).get("hydrajax", {}) if file.is_file() else {}
    return record.get("base", {}).get("shapes")


def about() -> dict:
    """Return ``ABOUT.json``: the ``sources`` with their licences, and the ``held_out`` files.

    Names of held-out files begin with ``standard_library/`` or ``packages/``, followed by the path in the standard
    library or in the folder of installed packages: ``"standard_library/email/message.py"``.
    """
    file = _present("ABOUT.json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HydrajaxError(f"assets: {file} is not JSON: {error}") from None


def _present(name: str) -> Path:
    if not (FOLDER / name).exists():
        raise HydrajaxError(f"assets: no {name} in {FOLDER}: this installation has no bundled model")
    return FOLDER / name
