"""CPU kernels for a decode step's few rows: matrix products, attention and norms.

The library is built at installation if there is a C++ compiler; without one `available` returns False and XLA computes
the same more slowly. A row's result does not depend on the number of rows, to the last bit.

Measured on 2 cores of an Intel Xeon (AVX-512), jax 0.10.2, all products of six layers of width 512, 76 MB of float32
weights, in a loop, in ms:

| rows          | 1   | 2   | 4   | 8   | 16  | 64   |
|---------------|-----|-----|-----|-----|-----|------|
| XLA           | 3.1 | 3.6 | 5.0 | 6.9 | 8.5 | 14.5 |
| these kernels | 2.3 | 2.3 | 2.8 | 3.6 | 5.0 | 13.8 |

All products of SmolLM2-135M, 538 MB, which no cache holds, on 2 cores of a newer Intel Xeon, in ms. Before, each thread
read columns of every weight, prefetches came in bursts, and lanes were summed one by one:

| rows          | 1    | 6    | 8    | 11   | 16   | 64  |
|---------------|------|------|------|------|------|-----|
| before        | 21.0 | 25.0 | 27.4 | 31.3 | 35.2 | 93  |
| these kernels | 19.8 | 22.9 | 24.4 | 28.6 | 32.1 | 95  |

Reading alone takes 18 ms there (two threads, 29 GB/s, pages of 4 kB; see `hydrajax.host_memory` for larger ones).

The same products on 2 cores of an AMD EPYC (Zen 4), pages of 4 kB, the least of 20 times, in ms. Before, more than 8
rows were read in groups of 8; now up to 14 rows stay in registers:

| rows          | 1    | 8    | 9    | 11   | 12   | 14   | 16   | 32   |
|---------------|------|------|------|------|------|------|------|------|
| before        | 18.8 | 19.9 | 31.1 | 34.0 | 34.2 | 35.8 | 38.3 | 61.4 |
| these kernels | 18.4 | 19.8 | 22.1 | 23.0 | 24.2 | 26.0 | 38.0 | 61.5 |

On 2 cores of an AMD EPYC (Zen 5), eight layers of width 384 and an lm head, 72 MB: XLA with 1 row 1.8, the kernels
with 2 to 8 rows 1.8 to 2.0, with 16 rows 2.5, with 64 rows 7.5.

The same layers without the lm head, 66 MB, on 2 cores of an AMD EPYC (Zen 4), in ms. Before, there was one source for
all CPUs with vectors of 64 bytes, which GCC splits into single numbers if the registers are narrower:

| rows         | 1    | 2    | 4    | 6    | 8    | 14    | 16    | 64    |
|--------------|------|------|------|------|------|-------|-------|-------|
| AVX-512      | 2.0  | 2.0  | 2.1  | 2.4  | 2.2  | 3.1   | 3.8   | 12.7  |
| AVX2         | 2.3  | 2.5  | 2.5  | 3.0  | 3.8  | 4.9   | 5.4   | 16.8  |
| AVX2, before | 11.2 | 13.5 | 26.6 | 40.6 | 63.2 | 102.5 | 163.9 | 644.6 |

Weights are float32 or bfloat16. bfloat16 is widened in registers by a shift. On one thread of an Intel Xeon (AVX-512),
five layers of width 2048, 236M weights, in ms:

| rows     | 1    | 2    | 4    | 8    | 16   | 32    | 64    |
|----------|------|------|------|------|------|-------|-------|
| float32  | 57.6 | 59.4 | 60.6 | 66.1 | 96.0 | 144.7 | 252.5 |
| bfloat16 | 30.5 | 31.7 | 35.4 | 46.3 | 66.7 | 115.7 | 227.8 |

The bfloat16 instruction of AVX-512 (`vdpbf16ps`) is not used. It takes 0.59 ns there for twice the products of a
multiply-add of 0.15, rounds differently, and would need bfloat16 inputs.

With AMX (`amx.h`) bfloat16 is multiplied in tiles: the same weights and an lm head of 8192 tokens, two threads, in ms:

| rows                | 1    | 8    | 16   | 32   | 64    |
|---------------------|------|------|------|------|-------|
| float32             | 29.9 | 35.8 | 47.5 | 69.9 | 127.0 |
| bfloat16 in vectors | 15.6 | 22.9 | 36.4 | 63.9 | 119.6 |
| bfloat16 in tiles   | 16.0 | 17.9 | 21.1 | 25.9 | 39.5  |
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
    """Compute `hydrajax.models.backend.add_norm` with the gradient of ``plain``; ``added`` may be missing.

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

    Keys and values are float32, as the queries must then be, bfloat16 or `hydrajax.models.rounded.Int8Vectors`, the
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
