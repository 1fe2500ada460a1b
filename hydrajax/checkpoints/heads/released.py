"""Draft heads as other programs wrote them, in any format that a kind of drafter has registered.

Names, shapes and dtypes of the tensors are checked strictly before any of them is read. The formats themselves are
described beside the drafters, such as in `hydrajax.drafters.medusa_files`.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np

from hydrajax.checkpoints.tensors import expect_tensors, holds, open_tensors
from hydrajax.drafters.formats import HeadFormat
from hydrajax.drafters.registry import FORMATS
from hydrajax.errors import HydrajaxError
from hydrajax.models.config import LlamaConfig
from hydrajax.models.layout import MODEL, read, shapes

WHAT = "draft"


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
