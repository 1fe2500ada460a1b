"""Kernels in MXFP4 in tiles (`hydrajax.lowbit.tiles`): the experts of gpt-oss, bit by bit.

A weight is a number of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign) times a power of two for each 32 inputs of an
output, whose exponent is a byte (E8M0): 4.25 bits (Open Compute Project, Microscaling Formats 1.0).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from hydrajax.lowbit.int4_tiles import in_pairs
from hydrajax.lowbit.kernels import tile_layout
from hydrajax.lowbit.rounding import in_groups
from hydrajax.lowbit.tiles import Tiles
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace

VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the codes 0 to 7; 8 to 15 are negative
BIAS = 127  # of an exponent
MLPS = ("gate_up", "down", "shared_gate_up", "shared_down")


class Mxfp4Tiles(Tiles):
    """Codes of E2M1 numbers and exponents.

    Attributes:
        values: uint8, two codes in a byte (`tile_layout.tile_shape`).
        exponent: uint8 (`tile_layout.scale_shape`).
    """

    values: Any
    exponent: Any
    shape_: tuple[int, ...]

    @classmethod
    def arrays_of(cls, shape, axes):
        size = shape[0], math.prod(shape[1:])
        return {
            "values": (tile_layout.tile_shape(*size, per_byte=2), jnp.uint8, (None,) * 5),
            "exponent": (tile_layout.scale_shape(*size), jnp.uint8, (None,) * 3),
        }

    @classmethod
    def of_columns(cls, kernel):
        return cls.of_codes(*in_groups(kernel, codes_of), kernel.shape)

    @classmethod
    def of_codes(cls, codes: UInt8[np.ndarray, "D F"], exponents: UInt8[np.ndarray, "groups F"], shape) -> Mxfp4Tiles:
        """Return the kernel of a file's codes and exponents."""
        return cls(in_pairs(codes), tile_layout.per_group(exponents), shape)

    @staticmethod
    def widened(depth, width, values, exponent):
        codes = jnp.concatenate([values & 15, values >> 4], axis=2)
        numbers = jnp.asarray(np.concatenate([VALUES, -VALUES]))[codes]
        power = jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
        return tile_layout.from_tiles(numbers * power[:, :, None, :, None], depth, width)


class Mxfp4(Quantized):
    """The name of the type: MLPs and experts on one CPU device. Other kernels, and other devices, have floats."""

    @classmethod
    def stores(cls, name):
        return Mxfp4Tiles if name in MLPS and trace.has_few_bits() else None

    arrays_of, of, dequantized = Mxfp4Tiles.arrays_of, Mxfp4Tiles.of, Mxfp4Tiles.dequantized


def codes_of(groups: Float[np.ndarray, "n 32 F"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of the nearest numbers, and an exponent for each group, as the specification's 6.3 chooses it.

    Numbers that are MXFP4's stay the same.
    """
    largest = np.frexp(np.abs(groups).max(axis=1))[1] - 1  # of the power of two
    exponents = np.clip(largest - 2 + BIAS, 0, 2 * BIAS).astype(np.uint8)
    scaled = np.ldexp(groups, BIAS - exponents[:, None].astype(np.int32))
    # Of two as near ones the even code.
    codes = np.searchsorted((VALUES[1:] + VALUES[:-1]) / 2, np.abs(scaled), side="left").astype(np.uint8)
    ties = np.isin(np.abs(scaled), ((VALUES[1:] + VALUES[:-1]) / 2)[1::2])
    return codes + ties | (np.signbit(groups) << 3).astype(np.uint8), exponents


def widen(codes: UInt8[np.ndarray, "*rows 32"], exponents: UInt8[np.ndarray, "*rows"]) -> np.ndarray:
    """Return the numbers of codes in bfloat16, which holds them exactly."""
    numbers = np.concatenate([VALUES, -VALUES])[codes]
    return np.ldexp(numbers, exponents[..., None].astype(np.int32) - BIAS).astype(jnp.bfloat16)
