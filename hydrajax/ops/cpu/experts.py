"""Products of few rows with the matrices of their experts (`few_rows.cc`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array, DType


def matmul_experts(
    x: Float[Array, "R_or_pairs D"], experts: Int[Array, "R k"], weight: Float[Array, "E D F"], dtype: DType
) -> Float[Array, "pairs F"]:
    """Return ``x @ weight[e]`` in ``dtype`` for each pair of a row and one of its experts; without a gradient.

    Only the chosen experts' weights are read, each once. A pair's result does not depend on the others.

    Args:
        x: A row per token, or one per pair.
        experts: The pairs, row by row. Those outside 0 to E - 1 give zeros.
        weight: The experts' matrices.
        dtype: Of the result; sums are float32.
    """
    out = jax.ShapeDtypeStruct((experts.size, weight.shape[2]), dtype)
    return jax.ffi.ffi_call("hydrajax_matmul_experts", out, vmap_method="sequential")(
        x, experts.astype(jnp.int32), weight
    )
