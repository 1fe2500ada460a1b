"""Sums over chunks of positions whose gradient is taken chunk by chunk, in the forward pass.

A loss that is a sum over positions has a gradient that is one too. Taking it while a chunk's logits exist means that
they are neither kept for a backward pass nor computed again in one: 3 vocabulary matmuls per head in place of the 4 of
rematerialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def sum_over_chunks(
    parts: Sequence[Callable], prepare: Callable, params: Any, varying: Sequence[Any], rows: Sequence[Any], frozen: Any
) -> tuple[Any, list[Any]]:
    """``(Σ of all losses, for each part the Σ of its sums)`` over the leading, chunk axis of ``varying`` and ``rows``.

    prepare: ``prepare(frozen, i) -> shared``, once per chunk i, for all parts.
    parts:   ``parts[k](params, varying[k][i], rows[k][i], shared) -> (loss, sums)``, a float32 scalar and a pytree of
             such; one part after the other, so that the large arrays of one exist at a time.

    Differentiable, once, in the loss and with respect to ``params`` and ``varying``; their gradients are added up in
    float32 whatever their dtype.
    """
    n_chunks = len(jax.tree.leaves(varying)[0])

    def add(totals, new):
        return jax.tree.map(jnp.add, totals, new)

    def loop(params, varying, rows, frozen, differentiate: bool):
        def one_chunk(totals, chunk):
            (loss, sums, grads), (index, varying, rows) = totals, chunk
            shared = prepare(frozen, index)
            slopes, new_sums = [], []
            for part, x, row in zip(parts, varying, rows, strict=True):
                slope = ()
                if differentiate:
                    value_and_grad = jax.value_and_grad(part, argnums=(0, 1), has_aux=True)
                    (value, aux), (grad, slope) = value_and_grad(params, x, row, shared)
                    grads = add(grads, jax.tree.map(lambda g: g.astype(jnp.float32), grad))
                else:
                    value, aux = part(params, x, row, shared)
                loss = loss + value
                # The next part waits, so that the logits of two heads need not exist at once. (XLA CPU, jax 0.10,
                # drops barriers before it orders the program and may let them.)
                loss, grads, slope, shared = jax.lax.optimization_barrier((loss, grads, slope, shared))
                slopes.append(slope)
                new_sums.append(aux)
            return (loss, add(sums, new_sums), grads), tuple(slopes)

        first = jax.tree.map(lambda x: x[0], (varying, rows))
        shapes = jax.eval_shape(
            lambda params, xs, rows, frozen: [
                part(params, x, row, prepare(frozen, 0))[1] for part, x, row in zip(parts, xs, rows, strict=True)
            ],
            params,
            *first,
            frozen,
        )
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params) if differentiate else ()
        start = jnp.zeros(()), sums, grads
        return jax.lax.scan(one_chunk, start, (jnp.arange(n_chunks), tuple(varying), tuple(rows)))

    @jax.custom_vjp
    def total(params, varying, rows, frozen):
        (loss, sums, _), _ = loop(params, varying, rows, frozen, differentiate=False)
        return loss, sums

    def forward(params, varying, rows, frozen):
        (loss, sums, grads), slopes = loop(params, varying, rows, frozen, differentiate=True)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
        return (loss, sums), (grads, slopes)

    def backward(kept, cotangents):
        scaled = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), kept)
        return *scaled, None, None

    total.defvjp(forward, backward)
    return total(params, tuple(varying), tuple(rows), frozen)
