"""Every choice that depends on the backend, each with the figure that justifies it.

The rest of the package calls the functions here and does not ask which backend it runs on. A new kernel for a backend
belongs here too, behind the function that it replaces, with what was measured.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array
from hydrajax.models.kernels import few_rows as kernels


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def contract(spec: str, a: Array, b: Array, dtype) -> Array:
    """``einsum(spec, a, b)``, accumulated and returned in ``dtype``.

    Under `jax.default_matmul_precision` ("bfloat16") float32 inputs, and in the backward pass float32 gradients, are
    rounded to bfloat16 and their products added up in float32. XLA does so by itself on accelerators; on a CPU it
    ignores the setting, so the inputs are rounded here. Where a CPU has AMX, a [4096, 512] by [512, 1536] product then
    takes 4.5 ms in place of 25 (jax 0.10, 2 cores).
    """
    if _on_cpu() and jax.config.jax_default_matmul_precision == "bfloat16" and a.dtype == jnp.float32:
        return _rounded_contract(spec, a, b).astype(dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _contract_bfloat16(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_contract(spec: str, a: Array, b: Array) -> Array:
    return _contract_bfloat16(spec, a, b)


def _rounded_contract_forward(spec: str, a: Array, b: Array):
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # kept rounded: half the memory between the two passes
    return _contract_bfloat16(spec, a, b), (a, b)


def _rounded_contract_backward(spec: str, inputs, gradient: Array):
    a, b = inputs
    left, right, out = re.split(",|->", spec)
    gradient = gradient.astype(jnp.bfloat16)
    to_a = _contract_bfloat16(f"{out},{right}->{left}", gradient, b)
    return to_a, _contract_bfloat16(f"{left},{out}->{right}", a, gradient)


_rounded_contract.defvjp(_rounded_contract_forward, _rounded_contract_backward)


def few_rows(rows: int, dtype) -> bool:
    """Whether a product of so many rows is for the kernels of `hydrajax.models.kernels.few_rows`.

    One device only: XLA does not know how to divide a kernel that it did not make.
    """
    small = 1 < rows <= kernels.MOST_ROWS and dtype == jnp.float32
    return small and _on_cpu() and jax.device_count() == 1 and kernels.available()


def attends_few_rows(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Whether attention of these queries is for our own kernel."""
    n_tokens, head_dim = queries.shape[2:]
    fits = head_dim % kernels.LANES == 0 and head_dim <= kernels.LONGEST_HEAD
    return fits and few_rows(n_tokens, queries.dtype)


def matmul(x: Float[Array, "*rows D"], kernel: Float[Array, "D F"], dtype) -> Float[Array, "*rows F"]:
    """``x @ kernel``, accumulated and returned in ``dtype``.

    On a CPU a single row is multiplied as two half contractions whose products are added. XLA runs the two on two
    cores, where it leaves one core idle for some shapes: [512] by [512, 3072] takes 117 us in place of 196, and no
    shape was more than 10% slower (jax 0.10, 2 cores). With more than one row the same trick loses, up to threefold.
    """
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    flat = x.reshape(rows, width)
    if few_rows(rows, x.dtype) and kernel.dtype == jnp.float32:
        out = kernels.matmul(flat, kernel).astype(dtype)
    elif _on_cpu() and rows == 1 and width % 2 == 0:
        halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
        out = jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
    else:
        out = contract("rd,df->rf", flat, kernel, dtype)
    return out.reshape(*x.shape[:-1], -1)


def matmul_transposed(x: Float[Array, "*rows D"], weight: Float[Array, "F D"], dtype) -> Float[Array, "*rows F"]:
    """``x @ weight.T``, accumulated and returned in ``dtype``: an embedding that is the lm head too.

    XLA's CPU products of a few rows would first make a transposed copy of the weight, in every step.
    """
    flat = x.reshape(-1, x.shape[-1])
    if few_rows(len(flat), x.dtype) and weight.dtype == jnp.float32:
        out = kernels.matmul_transposed(flat, weight).astype(dtype)
    else:
        out = contract("rd,fd->rf", flat, weight, dtype)
    return out.reshape(*x.shape[:-1], -1)


# XLA's CPU argmax is a scalar loop and a maximum is not, so the argmax is taken over the maxima of chunks and then
# within one chunk. For 64 x 32,000 logits that takes 0.4 ms in place of 5 (jax 0.10).
ARGMAX_CHUNK, ARGMAX_SMALLEST = 128, 1024


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The index of the largest number of each row, int32; of equal ones the smallest index."""
    size = logits.shape[-1]
    if size < ARGMAX_SMALLEST or size % ARGMAX_CHUNK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
    chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
    return (chunk * ARGMAX_CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def write_slots(
    slots: Float[Array, "B kv S H"], rows: Float[Array, "B kv R H"], starts: Int[Array, " B"]
) -> Float[Array, "B kv S H"]:
    """``rows`` written into ``slots`` from slot ``starts[b]`` of each batch row on, in place where XLA can.

    A batch of one is a plain slice update. The batched form becomes a scatter, which costs more on every backend.
    """
    if slots.shape[0] == 1:
        return jax.lax.dynamic_update_slice(slots, rows, (0, 0, starts[0], 0))
    update = jax.vmap(lambda s, r, at: jax.lax.dynamic_update_slice(s, r, (0, at, 0)))
    return update(slots, rows, starts)
