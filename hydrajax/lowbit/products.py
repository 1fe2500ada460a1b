"""Products with weights of 8 and 4 bits away from a CPU: by our kernels, by integers, or by XLA, which widens them.

The types are in `hydrajax.lowbit.quantized` and `int4`, the products on a CPU in `hydrajax.lowbit.kernels.few_bits`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from hydrajax import ops
from hydrajax.lowbit.kernels import tile_layout
from hydrajax.lowbit.rounding import DIGIT, digits
from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.trace import mesh_in_use
from hydrajax.ops.xla import with_gradient_of


def multiplies_digits(rows: int) -> bool:
    """Return whether int8 weights are multiplied as integers, by `digits` of x: nothing is widened.

    A GPU of compute capability 7.5 has no Triton, and cuBLAS multiplies equal types only: XLA would write the weights
    out in 16 bits in every step. A TPU widens them on its vector unit, which takes longer than digits of one row; of
    many rows the sums of digits cost more. Our kernel of a TPU multiplies digits too.
    """
    return trace.on_turing() or (trace.on_tpu() and rows == 1 and mesh_in_use() is None)


def matmul_scaled(
    x: Float[Array, "rows D"], values: Shaped[Array, "D *parts F"], scale: Float[Array, "*parts F"], dtype
) -> Float[Array, "*parts rows F"]:
    """Return ``x @ (values * scale)`` in this dtype, with the parts of a fused kernel as leading axes.

    Values are int8, or float8_e4m3fn, which XLA's products read as they are on GPUs that have it.
    """
    depth, *parts, width = values.shape

    def scaled(product, scale):
        return (product * jnp.expand_dims(scale, -2)).astype(dtype)

    def plain(x, values, scale):
        return scaled(ops.matmul_parts(x, values.astype(x.dtype), jnp.float32, stored=False), scale)

    @with_gradient_of(plain)
    def as_integers(x, values, scale):
        first, second, step = digits(x)
        sums = ops.matmul_parts(jnp.concatenate([first, second]), values, jnp.int32, stored=False)
        first, second = jnp.split(sums.astype(jnp.float32), 2, axis=-2)
        return scaled((first + second / DIGIT) * step, scale)

    @with_gradient_of(plain)
    def on_chip(x, values, scale):
        arrays = as_stored(values).reshape(-1, depth, width), as_stored(scale).reshape(-1, width)
        return from_stored(few_bits_tpu.matmul_int8(x, *arrays, dtype), tuple(parts))

    if values.dtype != jnp.int8:
        return plain(x, values, scale)
    if trace.has_mosaic():
        from hydrajax.lowbit.kernels import few_bits_tpu

        if few_bits_tpu.fits(len(x), depth, width, x.dtype):
            return on_chip(x, values, scale)
    return (as_integers if multiplies_digits(len(x)) else plain)(x, values, scale)


def as_stored(array: Array) -> Array:
    """Return a fused kernel with its axes as `stored_order` lays them on a TPU, which moves nothing there."""
    last = array.ndim - 1
    return array.transpose(*reversed(range(last)), last)


def from_stored(product: Float[Array, "P rows F"], parts: tuple[int, ...]) -> Float[Array, "*parts rows F"]:
    """Return the product with a kernel `as_stored`, whose parts are one axis, with all parts in their order."""
    axes = len(parts)
    split = product.reshape(*reversed(parts), *product.shape[1:])
    return split.transpose(*reversed(range(axes)), axes, axes + 1)


Int4Parts = Callable[..., Float[Array, "*parts rows F"]]


def int4_kernel(rows: int, shape: tuple[int, ...], dtype) -> Int4Parts | None:
    """Return a function of rows of x, int4 weights ``[groups, 16, *parts, F]`` with scale and offset, and a dtype. It
    returns the product, with the parts as leading axes, and does not write wider weights to memory. None: there is no
    such function.
    """
    groups, parts, width = shape[0], shape[2:-1], shape[-1]

    def flattened(product: Callable) -> Int4Parts:
        def call(x, values, scale, offset, dtype):
            columns = (a.reshape(*a.shape[: a.ndim - len(parts) - 1], -1) for a in (values, scale, offset))
            return ops.parts_first(product(x, *columns, dtype), (*parts, width))

        return call

    if trace.has_triton():
        from hydrajax.lowbit.kernels import few_bits_gpu

        fits = few_bits_gpu.fits(rows, groups, math.prod(shape[2:]), dtype)
        return flattened(few_bits_gpu.matmul) if fits else None
    if trace.has_mosaic():
        from hydrajax.lowbit.kernels import few_bits_tpu

        def call(x, values, scale, offset, dtype):
            arrays = (
                as_stored(a).reshape(-1, *a.shape[1 : a.ndim - len(parts) - 1][::-1], groups, width)
                for a in (values, scale, offset)
            )
            return from_stored(few_bits_tpu.matmul_int4(x, *arrays, dtype), parts)

        return call if few_bits_tpu.fits(rows, groups * tile_layout.GROUP, width, dtype) else None
    if rows <= MOST_ROWS and trace.on_turing() and mesh_in_use() is None:
        return flattened(_int4_rows)
    return None


# XLA multiplies two rows in one fusion, more in a fusion each, so that the weight is read once for every two. Up to 8
# rows these are fewer bytes than those of a wider weight, which is written and read.
MOST_ROWS = 8


def _int4_rows(x, values, scale, offset, dtype) -> Float[Array, "R F"]:
    """Multiply a few rows in fusions of XLA, which widen the weight on the chip."""
    groups, half, _ = values.shape
    x = x.astype(jnp.float32).reshape(len(x), groups, 2, half, 1)
    scale, offset = (numbers.astype(jnp.float32)[:, None] for numbers in (scale, offset))
    first, second = ((numbers.astype(jnp.float32) * scale + offset) for numbers in (values & 15, values >> 4))
    products = [row[:, 0] * first + row[:, 1] * second for row in x]
    pairs = (tuple(products[at : at + 2]) for at in range(0, len(products), 2))
    sums = [jax.lax.reduce(each, (jnp.float32(0),) * len(each), _add_each, (0, 1)) for each in pairs]
    return jnp.stack([row for pair in sums for row in pair]).astype(dtype)


def _add_each(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(map(jnp.add, a, b))
