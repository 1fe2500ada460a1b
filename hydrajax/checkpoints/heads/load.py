"""Draft heads in any format that we read; a directory's ``config.json`` and tensors tell which it is."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from hydrajax.checkpoints.fingerprint import check_fingerprint
from hydrajax.checkpoints.heads import native
from hydrajax.checkpoints.heads.released import find_format, load_released
from hydrajax.checkpoints.tensors import read_json
from hydrajax.files import check_directory
from hydrajax.models.config import LlamaConfig

WHAT = "draft"
RECORD = "hydrajax"  # the field of an exported config.json that says what the heads were made for, and how


def load_draft(
    directory: str | Path,
    base: LlamaConfig,
    dtype=jnp.float32,
    *,
    base_directory: str | Path | None = None,
    adapter: str | Path | None = None,
):
    """Load ``(drafter, draft_params)`` for a base of this configuration.

    dtype: of parameters and computation; None keeps that of the files.
    base_directory: where that base lies. Heads that know which base they were made for are then refused for another.
        Most released ones do not know.
    adapter: where the adapter lies that the base there has; a base with an adapter is another one than without.

    Raises `HydrajaxError` for anything missing, damaged, unsupported or made for another base.
    """
    directory = Path(directory)
    check_directory(directory, WHAT)
    config = read_json(directory / "config.json", WHAT)
    format = None if native.MARK in config else find_format(directory, config)
    record = config.get(RECORD)
    if base_directory is not None and isinstance(record, dict) and record.get("base"):
        name = str(config.get("base_model_name_or_path") or "")
        check_fingerprint(record["base"], name, Path(base_directory), f"{WHAT}: {directory}", adapter)
    dtype = None if dtype is None else jnp.dtype(dtype)
    if format is None:
        return native.load_native(directory, config, base, dtype)
    return load_released(directory, config, base, dtype, format)
