"""Recurrent layers over the nodes of a tree, and over an accepted path: kernels that treat each node as a token alone.

A node has the bits that it has without a tree, which the matmuls of `hydrajax.models.recurrence` cannot give.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array


def walk(
    state: Float[Array, "B h v k"],
    keys: Float[Array, "B G T k"],
    queries: Float[Array, "B G T k"],
    values: Float[Array, "B h T v"],
    decay: Float[Array, "B h T"],
    beta: Float[Array, "B h T"] | None,
    parents: Int[Array, "B T"],
) -> tuple[Float[Array, "B h T v"], Float[Array, "B h T v"]]:
    """Return each node's output and what it writes; see `hydrajax.models.recurrence`. All is float32.

    Args:
        decay: α of each node.
        beta: Strengths of the delta rule; None to write the values as they are.
        parents: The parent of each node, before it; -1 for the root.
    """
    out = jax.ShapeDtypeStruct(values.shape, jnp.float32)
    call = jax.ffi.ffi_call("hydrajax_walk", (out, out), vmap_method="sequential")
    arrays = state, keys, queries, values, decay, decay if beta is None else beta, parents.astype(jnp.int32)
    return tuple(call(*arrays, delta=beta is not None))


def advance(
    state: Float[Array, "B h v k"],
    keys: Float[Array, "B G T k"],
    written: Float[Array, "B h T v"],
    decay: Float[Array, "B h T"],
    path: Int[Array, "B R"],
    counts: Int[Array, " B"],
) -> Float[Array, "B h v k"]:
    """Return the states after the first ``counts[b]`` nodes of each path, in place."""
    out = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    call = jax.ffi.ffi_call("hydrajax_advance", out, vmap_method="sequential", input_output_aliases={0: 0})
    return call(state, keys, written, decay, path.astype(jnp.int32), counts.astype(jnp.int32))
