"""Sum a loss over chunks of positions and compute its gradient chunk by chunk, in the forward pass.

The gradient of a sum over positions is a sum too. Computing it while a chunk's logits exist means that they are neither
kept for a backward pass nor recomputed: 3 vocabulary matmuls per head, where rematerialisation needs 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def sum_over_chunks(
    parts: Sequence[Callable], prepare: Callable, params: Any, varying: Sequence[Any], rows: Sequence[Any], frozen: Any
) -> tuple[Any, list[Any]]:
    """Sum losses over the leading (chunk) axis of ``varying`` and ``rows``.

    The loss is differentiable once, with respect to ``params`` and ``varying``. Gradients are summed in float32.

    Args:
        parts: ``parts[k](params, varying[k][i], rows[k][i], shared) -> (loss, sums)``, a float32 scalar and a pytree of
            float32 scalars. Parts run one after the other, so that the large arrays of only one exist at a time.
        prepare: ``prepare(frozen, i) -> shared``, called once per chunk i for all parts.
        params, varying: differentiated; ``varying`` is a chunked pytree per part.
        rows, frozen: not differentiated; ``rows`` is a chunked pytree per part.

    Returns:
        ``(sum of all losses, for each part the sum of its sums)``.
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
                # Without it, the logits of two heads may exist at once (XLA CPU, jax 0.10, drops the barrier).
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
