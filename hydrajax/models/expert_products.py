"""Products of tokens with the matrices of their experts.

Every way reads only the experts that some token chose, each once, and sums a token's experts in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from hydrajax.models import backend
from hydrajax.models.arrays import Array, DType
from hydrajax.models.kernels import few_bits, few_rows
from hydrajax.models.kernels.few_rows import with_gradient_of
from hydrajax.models.per_device import DATA, MODEL, axis_over, mesh_in_use, on_each_device
from hydrajax.models.quantized import Quantized, Tiles
from hydrajax.models.weights import project, project_parts

Kernels = Array | Quantized  # of all experts, each array with a leading axis


def expert_sum(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    gate_up: Kernels,
    down: Kernels,
    count: int,
    activation: Callable,
) -> Float[Array, "B T D"]:
    """Return the weighted sum of each token's experts.

    On a mesh whose model axis divides the experts evenly, each device has some of them, and one sum joins the devices.

    Args:
        x: The tokens.
        ids: Their experts, ascending.
        weights: The weights of these, float32.
        gate_up: The experts' kernels ``[D, 2, F]``.
        down: Their kernels ``[F, D]``.
        count: E, their number.
        activation: Of the gates.
    """
    rows, model = P(axis_over(DATA, len(x))), axis_over(MODEL, count)
    here = count if model is None else count // mesh_in_use().shape[MODEL]

    def of_part(x, ids, weights, gate_up, down):
        if model is not None:
            ids = ids - jax.lax.axis_index(MODEL) * here
            weights = jnp.where((ids >= 0) & (ids < here), weights, 0)
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
        total = _sum_of_rows(*flat, gate_up, down, here, activation)
        total = total if model is None else jax.lax.psum(total, MODEL)
        return total.astype(x.dtype).reshape(x.shape)

    return on_each_device(of_part, (rows, rows, rows, P(model), P(model)), rows, x, ids, weights, gate_up, down)


def _sum_of_rows(x, ids, weights, gate_up, down, count: int, activation: Callable) -> Float[Array, "R D"]:
    """Return the sum in float32. Experts outside 0 to ``count`` - 1 are on other devices."""

    def mlp(x, gate_up, down):
        gate, up = project_parts(x, gate_up)
        return project(activation(gate) * up, down, jnp.float32)

    def plain(x, ids, weights, gate_up, down):
        @jax.checkpoint
        def add(total, expert):
            index, *kernels = expert
            weight = jnp.sum(jnp.where(ids == index, weights, 0), axis=1, keepdims=True)
            return total + weight * mlp(x, *kernels), None

        zeros = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.scan(add, zeros, (jnp.arange(count), gate_up, down))[0]

    @with_gradient_of(plain)
    def chosen(x, ids, weights, gate_up, down):
        if backend.multiplies_pairs(x.dtype, *jax.tree.leaves(gate_up)[:1]):
            gate, up = jnp.split(_of_pairs(x, ids, gate_up, x.dtype), 2, axis=-1)
            outs = _of_pairs(activation(gate) * up, ids, down, jnp.float32)
        else:
            outs = _in_blocks(x, ids, count, partial(_of_expert, mlp, gate_up, down))
        outs = outs.reshape(*ids.shape, x.shape[-1])
        total = weights[:, :1] * outs[:, 0]
        for i in range(1, ids.shape[1]):
            total = total + weights[:, i : i + 1] * outs[:, i]
        return total

    return chosen(x, ids, weights, gate_up, down)


def _of_pairs(x: Float[Array, "R_or_pairs D"], ids: Int[Array, "R k"], kernels: Kernels, dtype: DType) -> Array:
    """Return the product of every pair of a token and an expert by our CPU kernels, ``[pairs, F]``."""
    if isinstance(kernels, Tiles):
        width = math.prod(kernels.shape[1:])
        rows = x.astype(jnp.float32)
        return few_bits.matmul_experts(rows, ids, width, *kernels.arrays().values()).astype(dtype)
    return few_rows.matmul_experts(x, ids, kernels.reshape(*kernels.shape[:2], -1), dtype)


def _of_expert(mlp: Callable, gate_up: Kernels, down: Kernels, x: Float[Array, "R D"], expert: Array) -> Array:
    """Return ``mlp`` of rows that all belong to one expert."""
    return mlp(x, *jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, expert, keepdims=False), (gate_up, down)))


def _in_blocks(
    x: Float[Array, "R D"], ids: Int[Array, "R k"], count: int, product: Callable[[Array, Array], Array]
) -> Float[Array, "pairs D"]:
    """Return ``product(rows, expert)`` of every pair of a token and an expert, in float32, zeros for absent experts.

    The pairs are sorted by expert and multiplied in blocks, which have one expert each. A step of up to
    `backend.ROWS_OF_BLOCK` rows takes a block for each chosen expert.
    """
    n_rows, per_token = ids.shape
    n_pairs, size = ids.size, min(n_rows, backend.ROWS_OF_BLOCK)
    experts = jnp.where((ids >= 0) & (ids < count), ids, count).reshape(-1)
    pairs = jnp.argsort(experts, stable=True).astype(jnp.int32)
    counts = jnp.sum(experts[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    starts, ends = jnp.cumsum(counts) - counts, jnp.cumsum(-(-counts // size))  # pairs and blocks of each expert

    def block(i, out):
        expert = jnp.sum(ends <= i, dtype=jnp.int32)
        before = jnp.where(expert > 0, ends[expert - 1], 0)
        places = starts[expert] + (i - before) * size + jnp.arange(size, dtype=jnp.int32)
        present = places < starts[expert] + counts[expert]
        chosen = pairs[jnp.minimum(places, n_pairs - 1)]
        found = product(x[chosen // per_token], expert)
        return out.at[jnp.where(present, chosen, n_pairs)].set(found, mode="drop")

    return jax.lax.fori_loop(0, ends[-1], block, jnp.zeros((n_pairs, x.shape[-1]), jnp.float32))
