"""Draft parameters with kernels in few bits."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hydrajax import plugins
from hydrajax.ops import trace

# Kernels of drafts that only products read.
DRAFT_KERNELS = ("kernel", "shared_kernel", "path_kernel", "fc", "qkv", "out", "gate_up", "down")
DRAFT_KERNELS += ("lm_head", "lm_kernel", "lm_down", "lm_up", "copied_lm_head")


def quantized_draft(params: Mapping[str, Any], quantize: str | None) -> Mapping[str, Any]:
    """Return a draft's parameters with the kernels of products in few bits, if ``quantize`` names the base's type.

    They are in int4 for a base in 4 bits and in int8 for any other, and stay as they are where there are no CPU kernels
    for them, and in experts.
    """
    if quantize is None or not trace.has_few_bits():
        return params
    kind = plugins.find("weights", "int4" if quantize.startswith("int4") else "int8")
    return {
        name: quantized_draft(value, quantize)
        if isinstance(value, Mapping) and name != "experts"
        else jax.device_put(kind.stores(name).of(np.asarray(value)))
        if name in DRAFT_KERNELS
        else value
        for name, value in params.items()
    }
