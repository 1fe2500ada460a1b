"""Products of bfloat16 numbers on a CPU, accumulated in float32; of float32 numbers rounded to bfloat16."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp

from hydrajax.models.arrays import Array


def contract_bfloat16(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_contract(spec: str, a: Array, b: Array) -> Array:
    return contract_bfloat16(spec, a, b)


def _rounded_contract_forward(spec: str, a: Array, b: Array):
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # stays rounded: half the memory between the two passes
    return contract_bfloat16(spec, a, b), (a, b)


def _rounded_contract_backward(spec: str, inputs, gradient: Array):
    a, b = inputs
    left, right, out = re.split(",|->", spec)
    gradient = gradient.astype(jnp.bfloat16)
    to_a = contract_bfloat16(f"{out},{right}->{left}", gradient, b)
    return to_a, _contract_rows_of_both(f"{left},{out}->{right}", a, gradient)


def _contract_rows_of_both(spec: str, a: Array, b: Array) -> Array:
    """Return ``einsum(spec, a, b)`` of bfloat16 inputs in float32, where ``spec`` is a gradient's sum over rows.

    Without batch axes it is written as a matmul of two matrices: XLA compiles ``rd,rpf->dpf`` to an instruction that
    fails when it runs ("Unsupported element type for DotThunk::Execute", jax 0.10.2 on a CPU without AMX).
    """
    left, right, out = re.split(",|->", spec)
    if set(left) & set(right) & set(out):
        return contract_bfloat16(spec, a, b)
    rows = "".join(axis for axis in left if axis not in out)
    of_a, of_b = ("".join(axis for axis in axes if axis in out) for axes in (left, right))
    a, b = jnp.einsum(f"{left}->{rows + of_a}", a), jnp.einsum(f"{right}->{rows + of_b}", b)
    shape = (*a.shape[len(rows) :], *b.shape[len(rows) :])
    n_rows = math.prod(a.shape[: len(rows)])
    flat = contract_bfloat16("rd,rf->df", a.reshape(n_rows, -1), b.reshape(n_rows, -1))
    return jnp.einsum(f"{of_a + of_b}->{out}", flat.reshape(shape))


rounded_contract.defvjp(_rounded_contract_forward, _rounded_contract_backward)
