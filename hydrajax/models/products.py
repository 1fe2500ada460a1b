"""Matrix products, and the order in which weights are stored for them: every choice by backend, with its figure.

See `hydrajax.models.backend` for all else that depends on the backend.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from hydrajax.models import platforms
from hydrajax.models.arrays import Array
from hydrajax.models.kernels import few_rows as kernels
from hydrajax.models.per_device import mesh_in_use
from hydrajax.models.sequence_parallel import divides_tokens


def contract(spec: str, a: Array, b: Array, dtype) -> Array:
    """Return ``einsum(spec, a, b)``, accumulated and returned in ``dtype``.

    Under `jax.default_matmul_precision` ("bfloat16"), float32 inputs (and float32 gradients in the backward pass) are
    rounded to bfloat16 and accumulated in float32. XLA does this itself on accelerators; on a CPU it ignores the
    setting, so the inputs are rounded here, which AMX needs.

    On a CPU, bfloat16 inputs with a bfloat16 result are also accumulated in float32: XLA uses AMX for a float32 result
    only.
    """
    if platforms.on_cpu() and jax.config.jax_default_matmul_precision == "bfloat16" and a.dtype == jnp.float32:
        return _rounded_contract(spec, a, b).astype(dtype)
    if platforms.on_cpu() and a.dtype == b.dtype == dtype == jnp.bfloat16:
        return _contract_bfloat16(spec, a, b).astype(dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _contract_bfloat16(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_contract(spec: str, a: Array, b: Array) -> Array:
    return _contract_bfloat16(spec, a, b)


def _rounded_contract_forward(spec: str, a: Array, b: Array):
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # stays rounded: half the memory between the two passes
    return _contract_bfloat16(spec, a, b), (a, b)


def _rounded_contract_backward(spec: str, inputs, gradient: Array):
    a, b = inputs
    left, right, out = re.split(",|->", spec)
    gradient = gradient.astype(jnp.bfloat16)
    to_a = _contract_bfloat16(f"{out},{right}->{left}", gradient, b)
    return to_a, _contract_rows_of_both(f"{left},{out}->{right}", a, gradient)


def _contract_rows_of_both(spec: str, a: Array, b: Array) -> Array:
    """Return ``einsum(spec, a, b)`` of bfloat16 inputs in float32, where ``spec`` is a gradient's sum over rows.

    Without batch axes it is written as a product of two matrices: XLA compiles ``rd,rpf->dpf`` to an instruction that
    fails when it runs ("Unsupported element type for DotThunk::Execute", jax 0.10.2 on a CPU without AMX).
    """
    left, right, out = re.split(",|->", spec)
    if set(left) & set(right) & set(out):
        return _contract_bfloat16(spec, a, b)
    rows = "".join(axis for axis in left if axis not in out)
    of_a, of_b = ("".join(axis for axis in axes if axis in out) for axes in (left, right))
    a, b = jnp.einsum(f"{left}->{rows + of_a}", a), jnp.einsum(f"{right}->{rows + of_b}", b)
    shape = (*a.shape[len(rows) :], *b.shape[len(rows) :])
    n_rows = math.prod(a.shape[: len(rows)])
    flat = _contract_bfloat16("rd,rf->df", a.reshape(n_rows, -1), b.reshape(n_rows, -1))
    return jnp.einsum(f"{of_a + of_b}->{out}", flat.reshape(shape))


_rounded_contract.defvjp(_rounded_contract_forward, _rounded_contract_backward)


def few_rows(rows: int, *dtypes) -> bool:
    """Return whether `hydrajax.models.kernels.few_rows` computes products with this many rows and these dtypes.

    XLA would widen each bfloat16 weight in memory.
    """
    small = 0 < rows <= kernels.MOST_ROWS and all(dtype in kernels.DTYPES for dtype in dtypes)
    return small and platforms.has_cpu_kernels()


def matmul(x: Num[Array, "*rows D"], kernel: Num[Array, "D F"], dtype, *, stored: bool = True) -> Num[Array, "*rows F"]:
    """Return ``x @ kernel``, accumulated and returned in ``dtype``.

    On a CPU without our kernels a single row is multiplied as two half contractions whose results are added. XLA runs
    the two on two cores, while it leaves one core idle for some shapes. More rows would be slower in halves.

    Args:
        x: Rows.
        kernel: The weight.
        dtype: Of the result and the accumulation.
        stored: The kernel lies in memory as it is (it is not dequantised on the way).
    """
    if dtype == x.dtype and divides_tokens(x):  # the axis of tokens stays one, to be divided
        return contract("btd,df->btf", x, kernel, dtype)
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    flat = x.reshape(rows, width)
    if platforms.on_tpu() and dtype != x.dtype:  # an lm head
        # XLA would relayout its weight, and with several rows compute a draft head's block again for each part of the
        # vocabulary.
        flat = jax.lax.optimization_barrier(flat)
    if few_rows(rows, x.dtype, kernel.dtype, dtype):
        out = kernels.matmul(flat, kernel, dtype)
    elif platforms.on_cpu() and rows == 1 and width % 2 == 0 and mesh_in_use() is None:
        halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
        out = jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
    else:
        out = _contract_rows("rd,df->rf", flat, kernel, dtype, stored)
    return out.reshape(*x.shape[:-1], -1)


def matmul_transposed(x: Float[Array, "*rows D"], weight: Float[Array, "F D"], dtype) -> Float[Array, "*rows F"]:
    """Return ``x @ weight.T``, accumulated and returned in ``dtype``: an embedding that is also the lm head.

    XLA's CPU products of a few rows would first transpose the weight, in every step.
    """
    flat = x.reshape(-1, x.shape[-1])
    if few_rows(len(flat), x.dtype, weight.dtype):
        out = kernels.matmul_transposed(flat, weight).astype(dtype)
    else:
        out = _contract_rows("rd,fd->rf", flat, weight, dtype)
    return out.reshape(*x.shape[:-1], -1)


def matmul_float32(x: Float[Array, "*rows D"], kernel: Float[Array, "D F"]) -> Float[Array, "*rows F"]:
    """Return ``x @ kernel`` in float32 without rounding the inputs: the scores of a router, which decide.

    An accelerator would round float32 inputs to TF32 or bfloat16.
    """
    wide = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if few_rows(len(wide), kernel.dtype):
        out = kernels.matmul(wide, kernel, jnp.float32)
    else:
        out = jnp.matmul(wide, kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return out.reshape(*x.shape[:-1], -1)


def _contract_rows(spec: str, x: Num[Array, "rows D"], weight: Array, dtype, stored: bool = True) -> Array:
    """Apply `contract` to rows of ``x``; ``r`` in the specification.

    cuBLAS cannot multiply a single 16-bit row into a float32 result, so XLA converts the whole weight in every step. A
    TPU multiplies a single row on the slower vector unit. Repeating the row avoids both.
    """
    widened = stored and platforms.platform().name == "gpu" and dtype == jnp.float32 and x.dtype != jnp.float32
    if len(x) == 1 and (widened or platforms.on_tpu()):
        twice = contract(spec, jnp.concatenate([x, x]), weight, dtype)
        return jax.lax.slice_in_dim(twice, 0, 1, axis=spec.partition("->")[2].index("r"))
    return contract(spec, x, weight, dtype)


def stored_order(shape: tuple[int, ...], dtype, axes: Iterable[str | None] | None = None) -> tuple[int, ...] | None:
    """Return the order of a weight's axes in memory, outermost first, for `jax.experimental.layout`; None: JAX's own.

    A TPU stores the last two axes in tiles of 8 by 128, and a fused kernel ``[D, 2, F]`` as it is declared would be
    laid out anew in every step: 180 MB per layer of a 7B, three times the cycles of its product. With D next to F, it
    is read in place. cuBLAS multiplies int8 where both factors have D as their last axis.

    Kernels of experts, by the logical names ``axes``, have a leading axis, which stays the outermost: each expert's is
    one stretch of memory.
    """
    if next(iter(axes or ()), None) == "experts":
        order = stored_order(shape[1:], dtype)
        return None if order is None else (0, *(axis + 1 for axis in order))
    if platforms.on_turing() and dtype == jnp.int8 and len(shape) > 1:
        return (*range(1, len(shape)), 0)
    if not platforms.on_tpu() or len(shape) < 3:
        return None
    last = len(shape) - 1
    return (*reversed(range(last)), last)


def trained_order(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return `stored_order` of a fused kernel that is trained: with D last, as the gradient's product writes it.

    XLA would relayout kernel and moments before and after each step.
    """
    if not platforms.on_tpu() or len(shape) < 3:
        return None
    last = len(shape) - 1
    return (*reversed(range(1, last)), last, 0)


FUSED_ROWS = 128  # of a fused product on a TPU; with more, XLA copies the parts of the result


def matmul_parts(
    x: Num[Array, "*rows D"],
    kernel: Num[Array, " D *parts F"],
    dtype,
    *,
    stored: bool = True,
    trained: int | None = None,
) -> Num[Array, "*parts *rows F"]:
    """Return `matmul` of a fused kernel, part by part. On a TPU the kernel is read as `stored_order` stores it.

    On a mesh, a kernel ``[D, 2, F]`` that is divided over F would be gathered to be reshaped, in every step.

    ``trained``: the number of features of ``x``, from the first on, that need a gradient; None: all.
    """
    if divides_tokens(x) and jnp.issubdtype(x.dtype, jnp.floating):
        return _with_joint_gradient(functools.partial(_matmul_parts, dtype=dtype, stored=stored), x, kernel, trained)
    return _matmul_parts(x, kernel, dtype, stored)


def _with_joint_gradient(multiply: Callable, x, kernel, trained: int | None):
    """Return ``multiply(x, kernel)``. The gradient of x, or of its first features, is one product with all parts.

    A product for each part would write all features again to add them.
    """

    @jax.custom_vjp
    def product(x, kernel):
        return multiply(x, kernel)

    def backward(kept, gradient):
        x, kernel = kept
        parts = "kp"[4 - kernel.ndim :]
        to_x = contract(f"{parts}btf,d{parts}f->btd", gradient, kernel[:trained], x.dtype)
        to_x = jnp.pad(to_x, ((0, 0), (0, 0), (0, x.shape[-1] - to_x.shape[-1])))
        return to_x, *jax.vjp(functools.partial(multiply, x), kernel)[1](gradient)

    product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
    return product(x, kernel)


def _matmul_parts(x, kernel, dtype, stored: bool):
    rows, features = x.shape[:-1], kernel.shape[1:]
    if not platforms.on_tpu() and mesh_in_use() is None:
        return parts_first(matmul(x, kernel.reshape(len(kernel), -1), dtype, stored=stored), features)
    flat, parts = x.reshape(-1, x.shape[-1]), "kp"[3 - len(features) :]
    if platforms.on_tpu() and len(flat) > FUSED_ROWS and parts:
        return _by_section(x, kernel, dtype)
    out = _contract_rows(f"rd,d{parts}f->{parts}rf", flat, kernel, dtype, stored)
    return out.reshape(*features[:-1], *rows, features[-1])


def _by_section(x, kernel, dtype):
    """Return the products with queries, keys and values, or gate and up, joined for callers that take them apart.

    XLA copies gate and heads out of a fused product, but removes this concatenation. With x as one axis of rows it
    would relayout queries' kernels, and without the barrier multiply up within down's kernel, which is slower.
    """
    parts, heads = kernel.shape[-2], "k" * (kernel.ndim - 3)
    rows, shape = "bt"[3 - x.ndim :], x.shape[:-1]
    if heads and len(shape) == 2 and shape[0] == 1 and shape[1] % FUSED_ROWS == 0:  # to XLA this is one axis
        x = x.reshape(-1, FUSED_ROWS, x.shape[-1])
    spec = f"{rows}d,d{heads}pf->{rows[:-1]}{heads}p{rows[-1]}f"
    products = [
        contract(spec, x, section, dtype) for section in jnp.split(kernel, [max(0, parts - 2), parts - 1], axis=-2)
    ]
    if not heads:
        products = jax.lax.optimization_barrier(products)
    if len(rows) == 2:
        products = [jnp.moveaxis(product, 0, -3) for product in products]
    products = [product.reshape(*product.shape[: len(heads) + 1], *shape, product.shape[-1]) for product in products]
    return jnp.concatenate(products, axis=len(heads))


def split_heads(qkv: Num[Array, "kv parts B T H"], sizes: Sequence[int]) -> list[Num[Array, "B kv part T H"]]:
    """Return the heads of a fused product in parts of these sizes. A TPU's products are already apart."""
    places = np.cumsum(sizes)[:-1]
    if platforms.on_tpu():
        return [part.transpose(2, 0, 1, 3, 4) for part in jnp.split(qkv, places, axis=1)]
    return jnp.split(qkv.transpose(2, 0, 1, 3, 4), places, axis=2)


def parts_first(product: Num[Array, "*rows F"], features: tuple[int, ...]) -> Num[Array, "*parts *rows f"]:
    """Return a fused kernel's product with the parts, all features but the last, as leading axes."""
    rows, parts = product.ndim - 1, len(features) - 1
    split = product.reshape(*product.shape[:-1], *features)
    return jnp.moveaxis(split, range(rows, rows + parts), range(parts))
