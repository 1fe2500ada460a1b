"""GPU kernel: the sum of two rows and its RMSNorm, for the single row of a step without a draft.

XLA compiles this to three kernels, and to one for several rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from hydrajax.models.arrays import Array
from hydrajax.ops.gpu.launch import launch

NAME = "hydrajax_add_norm"


def add_norm(
    x: Float[Array, " D"], added: Float[Array, " D"] | None, scale: Float[Array, " D"], eps: float, *,
    interpret: bool = False,
) -> tuple[Float[Array, " D"], Float[Array, " D"]]:  # fmt: skip
    """Return ``(sum, sum / rms(sum) * scale)`` of ``x + added``, or of ``x`` alone; statistics in float32."""
    inputs = [x, scale] if added is None else [x, scale, added]
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = functools.partial(_kernel, eps=eps)
    *total, normed = launch(
        kernel, *inputs, name=NAME, out_shape=[row] * (len(inputs) - 1), warps=8, interpret=interpret
    )
    return (total[0] if total else x), normed


def _kernel(x, scale, *rest, eps: float):
    """Compute one row; ``rest`` is the summand and the output of the sum, if there is one, and the output of the
    norm.
    """
    size = x.shape[0]
    place = jnp.arange(pl.next_power_of_2(size))
    inside, place = place < size, jnp.minimum(place, size - 1)  # a kernel's arrays hold powers of two
    row = x[place]
    if len(rest) > 1:
        row = row + rest[0][place]
        rest[1][place] = row
    wide = row.astype(jnp.float32)
    mean = jnp.sum(jnp.where(inside, wide * wide, 0.0)) / size
    normed = wide * jax.lax.rsqrt(mean + eps)
    if scale.dtype != row.dtype:  # as in `hydrajax.ops.add_norm`
        rest[-1][place] = (normed * scale[place]).astype(row.dtype)
    else:
        rest[-1][place] = normed.astype(row.dtype) * scale[place]
