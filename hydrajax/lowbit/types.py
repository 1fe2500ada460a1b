"""The types of few bits by the user's name, and which of them stores a kernel: in tiles on one CPU device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.lowbit.kernels import few_bits
from hydrajax.lowbit.quantized import Fp8, Int4, Int8, Quantized
from hydrajax.lowbit.tiles import Int4Tiles, Int8Tiles
from hydrajax.models.arrays import Array
from hydrajax.ops import trace

TILE_AXES, TILE = 5, (few_bits.COLUMNS, 4)  # the last two axes of tiles


def _with_group(kind: type[Quantized], size: int) -> type[Quantized]:
    """Return a type that quantises with a scale, and an offset if it has some, for each ``size`` inputs."""
    found = type(f"{kind.__name__}By{size}", (kind,), {"group": size, "__doc__": f"Groups of {size} inputs."})
    arrays = [field.name for field in dataclasses.fields(kind) if field.name != "shape_"]
    return jax.tree_util.register_dataclass(found, data_fields=arrays, meta_fields=("shape_",))


# In tiles, and elsewhere.
EIGHT_BITS: dict[str, tuple[type[Quantized], type[Quantized]]] = {
    "int8": (Int8Tiles, Int8),
    **{f"int8-{size}": (_with_group(Int8Tiles, size), Int8) for size in (64, 128)},
}
FOUR_BITS: dict[str, tuple[type[Quantized], type[Quantized]]] = {
    "int4": (Int4Tiles, Int4),
    **{f"int4-{size}": (_with_group(Int4Tiles, size), _with_group(Int4, size)) for size in (64, 128)},
}
FP8 = "fp8"
QUANTIZED = (*EIGHT_BITS, *FOUR_BITS, FP8)  # by the user's name
AS_STORED, WIDENED = "auto", "none"  # `hydrajax.formats.huggingface.stored_quantize`, and float weights


def quantized_type(name: str, kernel: str, stored: Array | jax.ShapeDtypeStruct | None = None) -> type[Quantized]:
    """Return the class that stores a kernel of this name. The lm head, and an embedding that is one, take 8 bits.

    Args:
        name: One of `QUANTIZED`.
        kernel: The parameter's name.
        stored: Its first array if it exists: a program for an absent device is traced with the present one's.

    Raises:
        HydrajaxError: The device has no such numbers.
    """
    if name == FP8 and not trace.has_fp8():
        raise HydrajaxError(
            "quantize: got fp8, expected an NVIDIA GPU of compute capability 8.9 or higher; without --quantize, files "
            "in fp8 are widened"
        )
    if name == FP8 and kernel != "lm_head":
        return Fp8
    if name not in EIGHT_BITS and kernel in ("lm_head", "embedding"):
        name = "int8"
    tiles, elsewhere = (EIGHT_BITS | FOUR_BITS)[name]
    return tiles if _in_tiles(stored) else elsewhere


def quantizes_embedding(name: str | None, stored: Array | None = None) -> bool:
    """Return whether an embedding that is also the lm head is quantised: where tiles are read in place."""
    return name is not None and _in_tiles(stored)


def _in_tiles(stored: Array | jax.ShapeDtypeStruct | None) -> bool:
    if stored is None:
        return trace.has_few_bits()
    return stored.ndim == TILE_AXES and stored.shape[-2:] == TILE


def described(dtype: str, quantize: str | None) -> str:
    """Describe the numbers of a base for messages."""
    return dtype if quantize in (None, WIDENED) else f"{dtype} with {quantize} weights"


# Kernels of drafts that only products read.
PRODUCTS = ("kernel", "shared_kernel", "path_kernel", "fc", "qkv", "out", "gate_up", "down")
PRODUCTS += ("lm_head", "lm_kernel", "lm_down", "lm_up", "copied_lm_head")


def quantized_draft(params: Mapping[str, Any], quantize: str | None) -> Mapping[str, Any]:
    """Return a draft's parameters with the kernels of products in `Int8Tiles`, if ``quantize`` names a type.

    They stay as they are where there are no kernels for tiles.
    """
    if quantize is None or not trace.has_few_bits():
        return params
    return {
        name: quantized_draft(value, quantize)
        if isinstance(value, Mapping)
        else jax.device_put(Int8Tiles.of(np.asarray(value)))
        if name in PRODUCTS
        else value
        for name, value in params.items()
    }
