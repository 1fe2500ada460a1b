"""Operations on a CPU: our kernels for few rows (`hydrajax.ops.cpu.few_rows`), or XLA's operations in another form."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.cpu import few_rows
from hydrajax.ops.xla import Xla, chosen_tokens, plain_norm


def uses_few_rows(rows: int, *dtypes) -> bool:
    """Return whether `hydrajax.ops.cpu.few_rows` multiplies this many rows of these dtypes. XLA would widen each
    bfloat16 weight in memory.
    """
    small = 0 < rows <= few_rows.MOST_ROWS and all(dtype in few_rows.DTYPES for dtype in dtypes)
    return small and trace.has_cpu_kernels()


class Cpu(Xla):
    """The operations of a CPU."""

    def contract(self, spec, a, b, dtype):
        """Return ``einsum(spec, a, b)``.

        XLA ignores `jax.default_matmul_precision` on a CPU, so inputs are rounded here, which AMX needs. It uses AMX
        for a float32 result only, so bfloat16 is accumulated in float32.
        """
        if trace.rounds_float32() and a.dtype == jnp.float32:
            return _rounded_contract(spec, a, b).astype(dtype)
        if a.dtype == b.dtype == dtype == jnp.bfloat16:
            return _contract_bfloat16(spec, a, b).astype(dtype)
        return super().contract(spec, a, b, dtype)

    def _matmul_rows(self, x, kernel, dtype, stored):
        rows, width = x.shape
        if uses_few_rows(rows, x.dtype, kernel.dtype, dtype):
            return few_rows.matmul(x, kernel, dtype)
        if rows == 1 and width % 2 == 0 and trace.mesh_in_use() is None:
            # XLA runs two halves on two cores, while it leaves one core idle for some shapes of a single row.
            halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
            return jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
        return super()._matmul_rows(x, kernel, dtype, stored)

    def matmul_transposed(self, x, weight, dtype):
        if uses_few_rows(len(x), x.dtype, weight.dtype):  # XLA would transpose the weight in every step
            return few_rows.matmul_transposed(x, weight).astype(dtype)
        return super().matmul_transposed(x, weight, dtype)

    def matmul_float32(self, x, kernel):
        if uses_few_rows(len(x), kernel.dtype):
            return few_rows.matmul(x, kernel, jnp.float32)
        return super().matmul_float32(x, kernel)

    def rows_kernel(self, queries):
        n_tokens, head_dim = queries.shape[2:]
        fits = head_dim % few_rows.LANES == 0 and head_dim <= few_rows.LONGEST_HEAD
        return few_rows.attend if fits and uses_few_rows(n_tokens, queries.dtype) else None

    def add_norm(self, x, added, scale, eps):
        if not (uses_few_rows(x.size // x.shape[-1], x.dtype) and scale.dtype == x.dtype):
            return super().add_norm(x, added, scale, eps)
        summands = (x,) if added is None else (x, added)
        first, *second = (y.reshape(-1, x.shape[-1]) for y in summands)
        total, normed = few_rows.add_norm(functools.partial(plain_norm, eps), eps, first, scale, *second)
        return total.reshape(x.shape), normed.reshape(x.shape)

    def take_rows(self, table, index):
        """Return rows of a table. XLA's gather from bfloat16 would widen the whole table."""
        plain = super().take_rows
        if not (table.dtype == jnp.bfloat16 and index.size and trace.has_cpu_kernels()):
            return plain(table, index)

        @few_rows.with_gradient_of(plain)
        def copied(table, index):
            rows = jnp.clip(index.reshape(1, -1), 0, len(table) - 1)
            room = jnp.zeros((1, 1, rows.size, table.shape[1]), table.dtype)
            (out,) = few_rows.append_rows([room], [table[None, None]], rows, jnp.zeros(1, jnp.int32))
            return out.reshape(*index.shape, table.shape[1])

        return copied(table, index)

    def summed_dtype(self, dtype):
        return jnp.promote_types(dtype, jnp.float32)  # XLA ends the process at sums of 16-bit numbers (jaxlib 0.10)

    def top_k(self, logits, k):
        return jax.lax.top_k(logits, k)[1].astype(jnp.int32)

    def append_rows(self, caches, blocks, index, starts):
        if trace.has_cpu_kernels():
            return few_rows.append_rows(caches, blocks, chosen_tokens(blocks, index), starts)
        return super().append_rows(caches, blocks, index, starts)

    def multiplies_pairs(self, dtype, kernel):
        """Return whether our kernels multiply pairs: XLA's `ragged_dot` computes all experts on a CPU, and a loop over
        the chosen ones copies their matrices.
        """
        return trace.has_cpu_kernels() and dtype in few_rows.DTYPES and kernel in few_rows.DTYPES

    def step_rows(self):
        return 10

    def host_calls(self):
        if not (trace.has_cpu_kernels() and trace.platform().devices == 1):
            return None
        from hydrajax.ops.cpu import call_host

        return call_host


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
