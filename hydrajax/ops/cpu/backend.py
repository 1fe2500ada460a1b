"""Operations on a CPU: our kernels for few rows, or XLA's operations in another form.

Without the library of kernels (`hydrajax.ops.cpu.library`) XLA computes the same more slowly. A row's result does not
depend on the number of rows, to the last bit.

Weights are float32 or bfloat16, which is widened in registers by a shift, or multiplied in tiles with AMX (`amx.h`).
The bfloat16 instruction of AVX-512 (`vdpbf16ps`) is not used: it is slower, rounds differently, and needs bfloat16
inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from hydrajax.models.arrays import Array, DType
from hydrajax.ops import trace
from hydrajax.ops.cpu.rounded import contract_bfloat16, rounded_contract
from hydrajax.ops.xla import FEW_ROWS, Xla, chosen_tokens, plain_norm, with_gradient_of

DTYPES = (jnp.float32, jnp.bfloat16)
LANES = 16  # a head must fill whole vectors of this length
LONGEST_HEAD = 512
MOST_LIKELY = 256  # tokens that `likeliest.cc` finds


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
    sinks: Float[Array, " heads"] | None,
    plain: Callable,
) -> Float[Array, "B T width"]:
    """Compute `hydrajax.models.attention.attend` with the gradient of ``plain``; scores and sums are in float32.

    Keys and values are float32, as the queries must then be, bfloat16 or `hydrajax.models.kv_vectors.Int8Vectors`, the
    same in all parts. Slots before the first and after the last visible one are not read.
    """

    @with_gradient_of(plain)
    def kernel(queries, parts, sinks):
        batch, heads, tokens, head_dim = queries.shape
        out = jax.ShapeDtypeStruct((batch, tokens, heads * head_dim), queries.dtype)
        arrays = jax.tree.leaves([(keys, values, _without_heads(visible)) for keys, values, visible in parts] + [sinks])
        return jax.ffi.ffi_call("hydrajax_attend", out, vmap_method="sequential")(queries, *arrays)

    return kernel(queries, parts, sinks)


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


def uses_few_rows(rows: int, *dtypes) -> bool:
    """Return whether our kernels multiply this many rows of these dtypes. XLA would widen each bfloat16 weight in
    memory.
    """
    small = 0 < rows <= FEW_ROWS and all(dtype in DTYPES for dtype in dtypes)
    return small and trace.has_cpu_kernels()


class Cpu(Xla):
    """The operations of a CPU."""

    def contract(self, spec, a, b, dtype):
        """Return ``einsum(spec, a, b)``.

        XLA ignores `jax.default_matmul_precision` on a CPU, so inputs are rounded here, which AMX needs. It uses AMX
        for a float32 result only, so bfloat16 is accumulated in float32.
        """
        if trace.rounds_float32() and a.dtype == jnp.float32:
            return rounded_contract(spec, a, b).astype(dtype)
        if a.dtype == b.dtype == dtype == jnp.bfloat16:
            return contract_bfloat16(spec, a, b).astype(dtype)
        return super().contract(spec, a, b, dtype)

    def _matmul_rows(self, x, kernel, dtype, stored):
        rows, width = x.shape
        if uses_few_rows(rows, x.dtype, kernel.dtype, dtype):
            return matmul(x, kernel, dtype)
        if rows == 1 and width % 2 == 0 and trace.mesh_in_use() is None:
            # XLA runs two halves on two cores, while it leaves one core idle for some shapes of a single row.
            halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
            return jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
        return super()._matmul_rows(x, kernel, dtype, stored)

    def matmul_transposed(self, x, weight, dtype):
        if uses_few_rows(len(x), x.dtype, weight.dtype):  # XLA would transpose the weight in every step
            return matmul_transposed(x, weight).astype(dtype)
        return super().matmul_transposed(x, weight, dtype)

    def matmul_float32(self, x, kernel):
        if uses_few_rows(len(x), kernel.dtype):
            return matmul(x, kernel, jnp.float32)
        return super().matmul_float32(x, kernel)

    def rows_kernel(self, queries):
        n_tokens, head_dim = queries.shape[2:]
        fits = head_dim % LANES == 0 and head_dim <= LONGEST_HEAD
        return attend if fits and uses_few_rows(n_tokens, queries.dtype) else None

    def path_kernel(self, n_tokens, width):
        if width % LANES or not uses_few_rows(n_tokens, jnp.float32) or trace.mesh_in_use() is not None:
            return None
        from hydrajax.ops.cpu import recurrence

        return recurrence

    def add_norm(self, x, added, scale, eps):
        if not (uses_few_rows(x.size // x.shape[-1], x.dtype) and scale.dtype == x.dtype):
            return super().add_norm(x, added, scale, eps)
        summands = (x,) if added is None else (x, added)
        first, *second = (y.reshape(-1, x.shape[-1]) for y in summands)
        total, normed = add_norm(functools.partial(plain_norm, eps), eps, first, scale, *second)
        return total.reshape(x.shape), normed.reshape(x.shape)

    def take_rows(self, table, index):
        """Return rows of a table. XLA's gather from bfloat16 would widen the whole table."""
        plain = super().take_rows
        if not (table.dtype == jnp.bfloat16 and index.size and trace.has_cpu_kernels()):
            return plain(table, index)

        @with_gradient_of(plain)
        def copied(table, index):
            rows = jnp.clip(index.reshape(1, -1), 0, len(table) - 1)
            room = jnp.zeros((1, 1, rows.size, table.shape[1]), table.dtype)
            (out,) = append_rows([room], [table[None, None]], rows, jnp.zeros(1, jnp.int32))
            return out.reshape(*index.shape, table.shape[1])

        return copied(table, index)

    def summed_dtype(self, dtype):
        return jnp.promote_types(dtype, jnp.float32)  # XLA ends the process at sums of 16-bit numbers (jaxlib 0.10)

    def top_k(self, logits, k):
        found = self.likeliest(jax.lax.stop_gradient(logits), k)
        return jax.lax.top_k(logits, k)[1].astype(jnp.int32) if found is None else found[0]

    def likeliest(self, logits, k):
        if not trace.has_cpu_kernels() or k > MOST_LIKELY:
            return None
        rows = logits.astype(jnp.float32).reshape(-1, logits.shape[-1])
        out = [jax.ShapeDtypeStruct((len(rows), k), dtype) for dtype in (jnp.int32, jnp.float32)]
        found = jax.ffi.ffi_call("hydrajax_likeliest", out, vmap_method="sequential")(rows)
        return tuple(each.reshape(*logits.shape[:-1], k) for each in found)

    def append_rows(self, caches, blocks, index, starts):
        if trace.has_cpu_kernels():
            return append_rows(caches, blocks, chosen_tokens(blocks, index), starts)
        return super().append_rows(caches, blocks, index, starts)

    def multiplies_pairs(self, dtype, kernel):
        """Return whether our kernels multiply pairs: XLA's `ragged_dot` computes all experts on a CPU, and a loop over
        the chosen ones copies their matrices.
        """
        return trace.has_cpu_kernels() and dtype in DTYPES and kernel in DTYPES

    def step_rows(self):
        return 10

    def host_calls(self):
        if not (trace.has_cpu_kernels() and trace.platform().devices == 1):
            return None
        from hydrajax.ops.cpu import call_host

        return call_host
