"""CPU kernels for a decode step's few rows: matrix products, attention and norms.

The library is built at installation if there is a C++ compiler; without one `available` returns False and XLA computes
the same more slowly. A row's result does not depend on the number of rows, to the last bit.

Weights are float32 or bfloat16, which is widened in registers by a shift, or multiplied in tiles with AMX (`amx.h`).
The bfloat16 instruction of AVX-512 (`vdpbf16ps`) is not used: it is slower, rounds differently, and needs bfloat16
inputs. docs/design.md has measurements.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from hydrajax.models.arrays import Array, DType

MOST_ROWS = 64  # beyond, XLA's product is faster
DTYPES = (jnp.float32, jnp.bfloat16)
LANES = 16  # a head must fill whole vectors of this length
LONGEST_HEAD = 256
LIBRARIES = "_cpu_avx512", "_cpu_avx2", "_cpu"  # by preference; setup.py builds those that a kind of CPU may have
TARGETS = (
    "hydrajax_matmul",
    "hydrajax_matmul_transposed",
    "hydrajax_attend",
    "hydrajax_add_norm",
    "hydrajax_matmul_few_bits",
    "hydrajax_matmul_experts",
    "hydrajax_matmul_few_bits_experts",
    "hydrajax_append_rows",
    "hydrajax_call_host",
)


@functools.cache
def available() -> bool:
    """Return whether the kernels can be called; loads and registers them the first time."""
    path = library()
    if path is None:
        return False
    loaded = ctypes.CDLL(str(path))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return True


def library() -> Path | None:
    """Return the path of the compiled library for this CPU, or None without one."""
    names = (name + suffix for name in LIBRARIES for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    paths = (Path(__file__).with_name(name) for name in names)
    return next((path for path in paths if path.is_file() and _runs_here(path)), None)


def _runs_here(path: Path) -> bool:
    try:
        return bool(ctypes.CDLL(str(path)).hydrajax_runs_here())
    except OSError:  # built for another system
        return False


def with_gradient_of(plain: Callable) -> Callable[[Callable], Callable]:
    """Give a kernel the gradient of ``plain``, which computes the same."""

    def wrap(kernel):
        wrapped = jax.custom_vjp(kernel)
        wrapped.defvjp(lambda *args: (kernel(*args), args), lambda args, slope: jax.vjp(plain, *args)[1](slope))
        return wrapped

    return wrap


def matmul(x: Float[Array, "R D"], weight: Float[Array, "D F"], dtype: DType = jnp.float32) -> Float[Array, "R F"]:
    """Return ``x @ weight`` in ``dtype``. Each output element is summed in float32, in an order that depends on the
    weight's shape and dtype only.
    """

    def plain(x, weight):
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32).astype(dtype)

    @with_gradient_of(plain)
    def kernel(x, weight):
        out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), dtype)
        return jax.ffi.ffi_call("hydrajax_matmul", out, vmap_method="sequential")(x, weight)

    return kernel(x, weight)


def matmul_experts(
    x: Float[Array, "R_or_pairs D"], experts: Int[Array, "R k"], weight: Float[Array, "E D F"], dtype: DType
) -> Float[Array, "pairs F"]:
    """Return ``x @ weight[e]`` in ``dtype`` for each pair of a row and one of its experts; without a gradient.

    Only the chosen experts' weights are read, each once. A pair's result does not depend on the others.

    Args:
        x: A row per token, or one per pair.
        experts: The pairs, row by row. Those outside 0 to E - 1 give zeros.
        weight: The experts' matrices.
        dtype: Of the result; sums are float32.
    """
    out = jax.ShapeDtypeStruct((experts.size, weight.shape[2]), dtype)
    return jax.ffi.ffi_call("hydrajax_matmul_experts", out)(x, experts.astype(jnp.int32), weight)


@with_gradient_of(lambda x, weight: jnp.matmul(x, weight.T, preferred_element_type=jnp.float32))
def matmul_transposed(x: Float[Array, "R D"], weight: Float[Array, "F D"]) -> Float[Array, "R F"]:
    """Return ``x @ weight.T`` in float32, without a transposed copy of the weight."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("hydrajax_matmul_transposed", out, vmap_method="sequential")(x, weight)


def add_norm(
    plain: Callable, eps: float, x: Float[Array, "R D"], scale: Float[Array, " D"], *added: Float[Array, "R D"]
) -> tuple[Float[Array, "R D"], Float[Array, "R D"]]:
    """Compute `hydrajax.ops.add_norm` with the gradient of ``plain``; ``added`` may be missing.

    All arrays have one dtype. XLA sums the squares of one row in another order than those of several.
    """

    @with_gradient_of(plain)
    def kernel(x, scale, *added):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call("hydrajax_add_norm", (out, out), vmap_method="sequential")
        return tuple(call(x, scale, *added, eps=np.float32(eps)))

    return kernel(x, scale, *added)


def attend(
    queries: Float[Array, "B heads T H"],
    parts: tuple,
    plain: Callable,
) -> Float[Array, "B T width"]:
    """Compute `hydrajax.models.attention.attend` with the gradient of ``plain``; scores and sums are in float32.

    Keys and values are float32, as the queries must then be, bfloat16 or `hydrajax.models.attention.Int8Vectors`, the
    same in all parts. Slots before the first and after the last visible one are not read.
    """

    @with_gradient_of(plain)
    def kernel(queries, parts):
        batch, heads, tokens, head_dim = queries.shape
        out = jax.ShapeDtypeStruct((batch, tokens, heads * head_dim), queries.dtype)
        arrays = jax.tree.leaves([(keys, values, _without_heads(visible)) for keys, values, visible in parts])
        return jax.ffi.ffi_call("hydrajax_attend", out, vmap_method="sequential")(queries, *arrays)

    return kernel(queries, parts)


def append_rows(
    caches: Sequence[Num[Array, "B kv S _"]],
    blocks: Sequence[Num[Array, "B kv T _"]],
    index: Int[Array, "B R"],
    starts: Int[Array, " B"],
) -> Sequence[Num[Array, "B kv S _"]]:
    """Write token ``index[b, r]`` of each block into slot ``starts[b] + r`` of ``caches``, in place."""
    call = jax.ffi.ffi_call(
        "hydrajax_append_rows",
        tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches),
        vmap_method="sequential",
        input_output_aliases={2 + i: i for i in range(len(caches))},
    )
    return call(index.astype(jnp.int32), starts.astype(jnp.int32), *caches, *blocks)


def _without_heads(visible: Array) -> Array:
    """Return a mask ``[T, S]``, or one that broadcasts to ``[B, 1, 1, T, S]``, as bool ``[B or 1, T or 1, S]``."""
    return visible[None] if visible.ndim == 2 else visible[:, 0, 0]
