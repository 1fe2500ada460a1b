"""Draft parameters with kernels in int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hydrajax import plugins
from hydrajax.ops import trace

DRAFTS = "int8"  # the weight type of drafts of a quantised base
# Kernels of drafts that only products read.
DRAFT_KERNELS = ("kernel", "shared_kernel", "path_kernel", "fc", "qkv", "out", "gate_up", "down")
DRAFT_KERNELS += ("lm_head", "lm_kernel", "lm_down", "lm_up", "copied_lm_head")


def quantized_draft(params: Mapping[str, Any], quantize: str | None) -> Mapping[str, Any]:
    """Return a draft's parameters with the kernels of products in int8, if ``quantize`` names a type.

    They stay as they are where there are no CPU kernels for them.
    """
    if quantize is None or not trace.has_few_bits():
        return params
    kind = plugins.find("weights", DRAFTS)
    return {
        name: quantized_draft(value, quantize)
        if isinstance(value, Mapping)
        else jax.device_put(kind.stores(name).of(np.asarray(value)))
        if name in DRAFT_KERNELS
        else value
        for name, value in params.items()
    }
