"""Draft heads in any format that we read; a directory's ``config.json`` and tensors tell which it is.

Names, shapes and dtypes of foreign tensors are checked strictly before any of them is read.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.files import check_directory
from hydrajax.formats import native
from hydrajax.formats.draft_registry import FORMATS
from hydrajax.formats.fingerprint import check_fingerprint
from hydrajax.formats.interface import HeadFormat
from hydrajax.formats.tensors import expect_tensors, holds, open_tensors, read_json
from hydrajax.models.layout import MODEL, read, shapes
from hydrajax.models.llama_config import LlamaConfig

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


def find_format(directory: Path, config: dict) -> HeadFormat:
    """The format of a directory with this ``config.json``; raises `HydrajaxError` if it is of none."""
    names: set[str] = set()
    fitting = [format for format in FORMATS if format.recognises(config, names)]
    if not fitting and holds(directory, MODEL):
        names = set(open_tensors(directory, MODEL, WHAT))
        fitting = [format for format in FORMATS if format.recognises(config, names)]
    if fitting:  # if no format's file is there, the first one's is missed
        return next((format for format in fitting if holds(directory, format.stem)), fitting[0])
    supported = ", ".join([*(format.known_by for format in FORMATS), "hydrajax's own ('hydrajax_draft')"])
    raise HydrajaxError(f"{WHAT}: {directory} is no directory of draft heads that loads; those are: {supported}")


def load_released(directory: Path, config: dict, base: LlamaConfig, dtype, format: HeadFormat):
    """``(drafter, draft_params)`` from a directory of this format, for a base of this configuration.

    config: the content of ``config.json``. dtype: of parameters and computation; None keeps that of the files.
    """
    files, where = open_tensors(directory, format.stem, WHAT), f"{WHAT}: {directory}"
    try:
        drafter = format.drafter(config, files, base)
    except HydrajaxError as error:
        raise HydrajaxError(f"{where}: {error}") from None
    expect_tensors(files, shapes(format.layout(drafter, config)), where, re.compile(format.ignored))
    try:
        drafter = format.settled(drafter, files, dtype)
    except HydrajaxError as error:
        raise HydrajaxError(f"{where}: {error}") from None
    layout = format.layout(drafter, config)
    return drafter, read(layout, files, lambda path, array: {path[-1]: jax.device_put(np.asarray(array, dtype))})
