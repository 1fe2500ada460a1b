"""Muon (Jordan et al. 2024): each matrix steps along the orthogonal matrix that is nearest to its momentum.

optax's own Muon computes every matrix on every device and in float32, and its momentum differs (bias correction). Here
the matrices are sharded over the devices of a mesh's ``data`` axis, and their matmuls follow the run's
``matmul_precision``. (The published code computes them in bfloat16.)
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from hydrajax.models.arrays import Array
from hydrajax.ops import contract, trace

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of the published code: a x + b x^3 + c x^5 on each singular value
ITERATIONS = 5
RMS = 0.2  # of Adam's updates, so that one learning rate suits both (Moonlight, arXiv 2502.16982, 2.2)


def scale_by_muon(
    batch_axis: Callable[[Any], int | None], mesh: Mesh | None = None, beta: float = 0.95
) -> optax.GradientTransformation:
    """Replace gradients by orthogonalised Nesterov momentum with entries of RMS 0.2.

    A leaf's first axis is its matrices' rows, and the others are their columns.

    Args:
        batch_axis: the axis of a leaf, by its path, that counts the matrices in it. None: it is one matrix.
        mesh: shard the matrices over the devices of its ``data`` axis.
    """

    def update(momentum, state, params=None):
        del params
        paths, structure = jax.tree.flatten_with_path(momentum)
        same_shape = defaultdict(list)
        for index, (path, leaf) in enumerate(paths):
            matrices = as_matrices(leaf, batch_axis(path))
            same_shape[matrices.shape[1:]].append((index, matrices))
        updates = [None] * len(paths)
        for group in same_shape.values():
            found = _sharded(jnp.concatenate([matrices for _, matrices in group]), mesh)
            for index, matrices in group:
                path, leaf = paths[index]
                mine, found = found[: len(matrices)], found[len(matrices) :]
                updates[index] = as_leaf(mine, leaf.shape, batch_axis(path))
        return structure.unflatten(updates), state

    return optax.chain(
        optax.trace(beta, nesterov=True), optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    )


def as_matrices(leaf: Array, batch_axis: int | None) -> Float[Array, "N rows columns"]:
    """Return the matrices in a leaf, transposed if they have more rows than columns."""
    matrices = leaf[None] if batch_axis is None else jnp.moveaxis(leaf, batch_axis, 0)
    matrices = matrices.reshape(*matrices.shape[:2], -1)
    return matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices


def as_leaf(matrices: Float[Array, "N rows columns"], shape: tuple[int, ...], batch_axis: int | None) -> Array:
    """Return the leaf that holds these matrices: the inverse of `as_matrices`."""
    if matrices.shape[1] != shape[0]:
        matrices = matrices.mT
    if batch_axis is None:
        return matrices.reshape(shape)
    inside = shape[:batch_axis] + shape[batch_axis + 1 :]
    return jnp.moveaxis(matrices.reshape(len(matrices), *inside), 0, batch_axis)


def _sharded(matrices: Float[Array, "N rows columns"], mesh: Mesh | None) -> Float[Array, "N rows columns"]:
    """Return `orthogonalise` of the matrices, padded to an equal number on each device."""
    if mesh is None:
        return orthogonalise(matrices)
    missing = -len(matrices) % mesh.shape["data"]
    shares = NamedSharding(mesh, PartitionSpec("data", *[PartitionSpec.UNCONSTRAINED] * 2))
    padded = jnp.pad(matrices, ((0, missing), (0, 0), (0, 0)))
    found = orthogonalise(jax.lax.with_sharding_constraint(padded, shares))
    return jax.lax.with_sharding_constraint(found, shares)[: len(matrices)]


def orthogonalise(matrices: Float[Array, "N rows columns"]) -> Float[Array, "N rows columns"]:
    """Return U V^T of each matrix U S V^T, up to singular values of 0.7 to 1.2, with entries of RMS 0.2.

    Newton-Schulz iterations, which are matmuls only.
    """
    a, b, c = COEFFICIENTS
    if trace.on_cpu():
        # XLA would multiply transposed matrices along their first axis, which it cannot in bfloat16 (jax 0.10, AMX).
        matrices = jax.lax.optimization_barrier(matrices)
    longer = matrices.shape[2]
    x = matrices / (jnp.linalg.norm(matrices, axis=(1, 2), keepdims=True) + 1e-8)
    for _ in range(ITERATIONS):
        square = contract("nij,nkj->nik", x, x, x.dtype)
        fourth = contract("nij,njk->nik", square, square, x.dtype)
        x = a * x + contract("nij,njk->nik", b * square + c * fourth, x, x.dtype)
    return RMS * longer**0.5 * x
