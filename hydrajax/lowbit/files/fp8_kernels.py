"""Layers in float8_e4m3fn as they are multiplied on GPUs that have it: a file's own numbers, without rounding."""

from __future__ import annotations

import numpy as np

from hydrajax.lowbit.files.four_bits import features_of
from hydrajax.lowbit.files.stored_linear import FP8, HasIntegers
from hydrajax.lowbit.quantized import Fp8
from hydrajax.models.layout import Entry


def fp8_kernel(files: HasIntegers, entry: Entry) -> Fp8 | None:
    """Return a kernel that equals the widened layers of an entry bit by bit.

    None if a layer is not in float8_e4m3fn, or has scales of groups or blocks of inputs.
    """
    layers = [files.integers(name) for name in entry.theirs]
    if not layers or not all(
        layer is not None and layer.numbers.dtype == FP8 and layer.zeros is None and len(layer.scales) == 1
        for layer in layers
    ):
        return None
    sizes = [layer.numbers.shape[1] for layer in layers]
    features = features_of(entry, len(layers[0].numbers), np.cumsum([0, *sizes]))
    scales = [np.broadcast_to(layer.scales[0], size) for layer, size in zip(layers, sizes, strict=True)]
    numbers = np.concatenate([layer.numbers for layer in layers], axis=1)
    return Fp8(numbers[:, features], np.concatenate(scales)[features])
