"""Every matmul with a weight goes through `project`, so that a backend can have its own measured choice.

A weight is an array, or `Int8`: one byte per number and a scale per output feature.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hydrajax.errors import HydrajaxError

ROWS = 256  # of a kernel that are quantised at once


class Int8(NamedTuple):
    """A weight-only quantised kernel: ``values * scale``, symmetric around zero, the scale per output feature.

    values: int8 ``[D, *features]``. scale: float32 ``[*features]``.
    """

    values: Array
    scale: Float[Array, "*features"]

    def dequantized(self) -> Float[Array, "D *features"]:
        return self.values.astype(jnp.float32) * self.scale


def quantize(kernel: np.ndarray) -> Int8:
    """The nearest int8 kernel, each output feature's largest weight being 127 (on the host)."""
    # Row by row in blocks: several float32 copies of an lm head at once would be the peak of the host's memory.
    blocks = [slice(i, i + ROWS) for i in range(0, len(kernel), ROWS)]
    largest = np.zeros(kernel.shape[1:], np.float32)
    for rows in blocks:
        np.maximum(largest, np.max(np.abs(kernel[rows].astype(np.float32)), axis=0), out=largest)
    if not np.all(np.isfinite(largest)):
        raise HydrajaxError("quantize: a weight is not a finite number")
    scale = largest / np.float32(127)
    scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # of a feature of zeros, or nearly
    values = np.empty(kernel.shape, np.int8)
    for rows in blocks:
        values[rows] = np.rint(kernel[rows].astype(np.float32) / scale)
    return Int8(values, scale)


def project(x: Float[Array, "*rows D"], kernel: Array | Int8, dtype=None) -> Float[Array, "*rows F"]:
    """``x @ kernel``, the kernel's axes after the first taken as one, F.

    dtype: of the result and of the accumulation, default ``x.dtype``.

    On a CPU a single row is multiplied as two half contractions and summed: XLA runs the two on two cores, where it
    leaves one idle for some shapes ([512] by [512, 3072]: 117 us for 196, jax 0.10, 2 cores; never slower than 10%).
    With more rows the same trick loses, up to threefold.
    """
    dtype = dtype or x.dtype
    if isinstance(kernel, Int8):
        product = project(x, kernel.values.astype(x.dtype), jnp.float32)
        return (product * kernel.scale.reshape(-1)).astype(dtype)
    width = x.shape[-1]
    kernel = kernel.reshape(width, -1)
    single_row = math.prod(x.shape[:-1]) == 1
    if single_row and width % 2 == 0 and jax.default_backend() == "cpu":
        halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
        out = jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
        return out.reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel, preferred_element_type=dtype)
