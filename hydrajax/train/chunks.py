"""Sum a loss over chunks of positions and compute its gradient chunk by chunk, in the forward pass.

The gradient of a sum over positions is a sum too. Computing it while a chunk's logits exist means that they are neither
kept for a backward pass nor recomputed: 3 vocabulary matmuls per head, where rematerialisation needs 4.
"""

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
    varying, rows = tuple(varying), tuple(rows)
    leaves, treedef = jax.tree.flatten(params)

    def first_chunk(leaves, varying, rows, frozen):
        params, shared = treedef.unflatten(leaves), prepare(frozen, 0)
        return [part(params, x, row, shared) for part, x, row in zip(parts, varying, rows, strict=True)]

    first = jax.tree.map(lambda x: x[0], (varying, rows))
    traced, outputs = jax.make_jaxpr(first_chunk, return_shape=True)(leaves, *first, frozen)
    read = {id(x) for operation in traced.eqns for x in operation.invars}
    is_read = [id(x) in read for x in traced.jaxpr.invars[: len(leaves)]]

    # The other leaves' gradients, zeros, would be carried through all chunks.
    trained = [x for x, yes in zip(leaves, is_read, strict=True) if yes]

    def of_trained(part):
        def with_rest(trained, *rest):
            given = iter(trained)
            every = [
                next(given) if yes else jnp.zeros(x.shape, x.dtype) for yes, x in zip(is_read, leaves, strict=True)
            ]
            return part(treedef.unflatten(every), *rest)

        return with_rest

    def add(totals, new):
        return jax.tree.map(jnp.add, totals, new)

    def loop(trained, varying, rows, frozen, differentiate: bool):
        def one_chunk(totals, chunk):
            (loss, sums, grads), (index, varying, rows) = totals, chunk
            shared = prepare(frozen, index)
            slopes, new_sums = [], []
            for part, x, row in zip(parts, varying, rows, strict=True):
                slope = ()
                if differentiate:
                    value_and_grad = jax.value_and_grad(of_trained(part), argnums=(0, 1), has_aux=True)
                    (value, aux), (grad, slope) = value_and_grad(trained, x, row, shared)
                    grads = add(grads, jax.tree.map(lambda g: g.astype(jnp.float32), grad))
                else:
                    value, aux = of_trained(part)(trained, x, row, shared)
                loss = loss + value
                # Without it, the logits of two heads may exist at once (XLA CPU, jax 0.10, drops the barrier).
                loss, grads, slope, shared = jax.lax.optimization_barrier((loss, grads, slope, shared))
                slopes.append(slope)
                new_sums.append(aux)
            return (loss, add(sums, new_sums), grads), tuple(slopes)

        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), [sums for _, sums in outputs])
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained) if differentiate else ()
        start = jnp.zeros(()), sums, grads
        return jax.lax.scan(one_chunk, start, (jnp.arange(n_chunks), varying, rows))

    @jax.custom_vjp
    def total(trained, varying, rows, frozen):
        (loss, sums, _), _ = loop(trained, varying, rows, frozen, differentiate=False)
        return loss, sums

    def forward(trained, varying, rows, frozen):
        (loss, sums, grads), slopes = loop(trained, varying, rows, frozen, differentiate=True)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, trained)
        return (loss, sums), (grads, slopes)

    def backward(kept, cotangents):
        scaled = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), kept)
        return *scaled, None, None

    total.defvjp(forward, backward)
    return total(trained, varying, rows, frozen)
