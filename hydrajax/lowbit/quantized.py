"""Kernels in 8 bits that keep the kernel's shape: XLA widens them within the product. `hydrajax.lowbit.int4` has 4.

On one CPU device they lie in tiles (`hydrajax.lowbit.tiles`). The lm head, and an embedding that is one, take 8 bits.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.lowbit import tiles
from hydrajax.lowbit.rounding import ROWS
from hydrajax.models.arrays import Array
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace

LM_HEADS = ("lm_head", "embedding")


class Int8(Quantized):
    """``values * scale``: symmetric, one byte per number and a scale per output feature.

    Attributes:
        values: int8 ``[D, *features]``.
        scale: float32 ``[*features]``.
    """

    dtype, largest = jnp.int8, 127  # of a number
    in_tiles = tiles.Int8Tiles  # the class on one CPU device
    scaled_outputs = True

    values: Any  # leaves of a pytree, which transformations replace by other things than arrays
    scale: Any

    @classmethod
    def stores(cls, name):
        if trace.has_few_bits():
            return cls.in_tiles
        return super().stores(name)

    @property
    def shape(self):
        return self.values.shape

    @classmethod
    def arrays_of(cls, shape, axes):
        return {"values": (shape, cls.dtype, axes), "scale": (shape[1:], jnp.float32, axes[1:])}

    @classmethod
    def of(cls, kernel):
        """Return the nearest kernel; each output feature's largest weight becomes the largest number."""
        kernel = np.asarray(kernel)
        # In blocks of rows: float32 copies of a whole lm head would be the peak of the host's memory.
        blocks = [slice(i, i + ROWS) for i in range(0, len(kernel), ROWS)]
        largest = np.zeros(kernel.shape[1:], np.float32)
        for rows in blocks:
            np.maximum(largest, np.max(np.abs(kernel[rows].astype(np.float32)), axis=0), out=largest)
        if not np.all(np.isfinite(largest)):
            raise HydrajaxError("quantize: got a weight that is not finite, expected finite numbers")
        scale = largest / np.float32(cls.largest)
        scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))  # for features of zeros, or nearly
        values = np.empty(kernel.shape, cls.dtype)
        for rows in blocks:
            values[rows] = cls._rounded(kernel[rows].astype(np.float32) / scale)
        return cls(values, scale)

    @staticmethod
    def _rounded(steps: np.ndarray) -> np.ndarray:
        return np.rint(steps)

    def dequantized(self):
        return self.values.astype(jnp.float32) * self.scale

    def project(self, x, dtype):
        product = _scaled_product(x, self.values.reshape(x.shape[-1], -1), self.scale.reshape(-1), dtype)
        return product.reshape(*x.shape[:-1], -1)

    def project_parts(self, x):
        product = _scaled_product(x, self.values, self.scale, x.dtype)
        return product.reshape(*self.shape[1:-1], *x.shape[:-1], self.shape[-1])


def _scaled_product(x: Array, values: Array, scale: Array, dtype) -> Array:
    from hydrajax.lowbit.products import matmul_scaled  # in tiles weights have other products

    return matmul_scaled(x.reshape(-1, x.shape[-1]), values, scale, dtype)


class Fp8(Int8):
    """``values * scale`` with values in float8_e4m3fn, for GPUs whose products read them (`trace.has_fp8`)."""

    dtype, largest = jnp.float8_e4m3fn, 448

    @classmethod
    def stores(cls, name):
        if not trace.has_fp8():
            raise HydrajaxError(
                "quantize: got fp8, expected an NVIDIA GPU of compute capability 8.9 or higher; without --quantize, "
                "files in fp8 are widened"
            )
        return Int8.stores(name) if name in LM_HEADS else cls

    @staticmethod
    def _rounded(steps):
        return steps.astype(jnp.float8_e4m3fn)


# In 8 bits only tiles have groups.
Int8By64 = tiles.with_groups(Int8, 64, in_tiles=tiles.Int8TilesBy64)
Int8By128 = tiles.with_groups(Int8, 128, in_tiles=tiles.Int8TilesBy128)
