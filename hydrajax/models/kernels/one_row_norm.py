"""GPU kernel: RMSNorm of a single row, for which XLA launches two kernels where it needs one for several rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from hydrajax.models.arrays import Array

NAME = "hydrajax_one_row_norm"


def one_row_norm(
    x: Float[Array, " D"], scale: Float[Array, " D"], eps: float, *, interpret: bool = False
) -> Float[Array, " D"]:
    """``x / rms(x) * scale``, the statistics in float32, as `hydrajax.models.layers.RMSNorm`."""
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name=NAME,
    )(x, scale)


def _kernel(x, scale, out, *, eps: float):
    size = x.shape[0]
    place = jnp.arange(pl.next_power_of_2(size))
    inside, place = place < size, jnp.minimum(place, size - 1)  # a kernel's arrays are of 2, 4, 8 ... numbers
    wide = x[place].astype(jnp.float32)
    mean = jnp.sum(jnp.where(inside, wide * wide, 0.0)) / size
    out[place] = (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype) * scale[place]
