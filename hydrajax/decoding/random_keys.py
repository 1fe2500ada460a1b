"""Random keys of sequences, and of positions in their outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array


def row_keys(rng: Array, batch: int, first: int = 0) -> Array:
    """Return keys ``[batch]``: the given ones, or a single key folded with each sequence's number, starting at
    ``first``.

    Keys of `jax.random.PRNGKey`, uint32 ``[2]`` or ``[batch, 2]``, are accepted.
    """
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.dtype != jnp.uint32 or rng.ndim not in (1, 2):
            raise HydrajaxError(f"rng: got {rng.dtype} {list(rng.shape)}, expected a jax.random.key or one per prompt")
        rng = jax.random.wrap_key_data(rng)
    if rng.ndim == 1:
        if rng.shape != (batch,):
            raise HydrajaxError(f"rng: got {rng.shape[0]} keys for {batch} prompts, expected one or one per prompt")
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(batch))


def position_keys(keys: Array, positions: Int[Array, " B *n"]) -> Array:
    """Return the keys for the tokens at these positions of each sequence's output.

    A sample there depends on nothing else: neither on the batch, nor on the tree and the drafter.
    """
    fold = jax.random.fold_in
    for _ in positions.shape[1:]:
        fold = jax.vmap(fold, (None, 0))
    return jax.vmap(fold)(keys, positions)
