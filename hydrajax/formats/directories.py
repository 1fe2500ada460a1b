"""Directories written by an export. They appear whole, and replace nothing but an earlier export."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.expert_layout import BIAS
from hydrajax.files import whole_directory
from hydrajax.locking import is_lock
from hydrajax.text.records import OBJECT, TEXT, checked, list_of, read_record

WHAT = "export"
EXACT = (BIAS, "expert_bias")  # ends of names: biases that choose experts, float32 in every file
MARK = "hydrajax_export"  # in config.json: the directory's files, by which a later export recognises its own


@contextmanager
def exported(directory: str | Path, overwrite: bool, what: str = WHAT) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield ``(folder, config)`` to fill; ``config`` becomes ``config.json``. Replaces an earlier export.

    Args:
        overwrite: replace a directory with any content.
        what: begins the error that the directory may not be replaced or cannot be written.
    """
    _check_replaceable(Path(os.path.realpath(directory)), overwrite, what)
    with whole_directory(directory, what) as folder:
        config: dict[str, Any] = {}
        yield folder, config
        files = sorted({path.name for path in folder.iterdir()} | {"config.json"})
        (folder / "config.json").write_text(json.dumps(config | {MARK: files}, indent=2) + "\n")


def _check_replaceable(target: Path, overwrite: bool, what: str) -> None:
    if os.path.exists(target) and not os.path.isdir(target):
        raise HydrajaxError(f"{what}: {target} is a file, expected a directory")
    present = {str(path.relative_to(target)) for path in target.rglob("*") if not (path.is_dir() or is_lock(path))}
    if not present or overwrite:
        return
    try:
        config = {"files": {}} | read_record(target / "config.json", {MARK: list_of(TEXT)}, what)
        own = {*config[MARK], *checked(config, {"files": OBJECT}, what)["files"]}
    except HydrajaxError:
        own = set()
    foreign = sorted(present - own)
    if foreign:
        raise HydrajaxError(
            f"{what}: {target} holds other files than an earlier export, such as '{foreign[0]}'; name another directory"
        )


def cast(tensors: dict[str, np.ndarray], dtype) -> dict[str, np.ndarray]:
    """Convert tensors to a dtype, except for those in `EXACT`; None keeps each one's own."""
    return {name: np.asarray(x, None if name.endswith(EXACT) else dtype) for name, x in tensors.items()}


def parameter_dtype(path: Sequence, dtype):
    """Return the dtype of a draft's parameter at this path (strings or JAX's keys), where others have ``dtype``."""
    return np.dtype(np.float32) if getattr(path[-1], "key", path[-1]) == "choice_bias" else dtype
