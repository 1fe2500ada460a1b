"""Every choice that depends on the backend, each with the figure that justifies it.

The rest of the package calls the functions here and does not ask which backend it runs on. A new kernel for a backend
belongs here too, behind the function that it replaces, with what was measured.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def matmul(x: Float[Array, "*rows D"], kernel: Float[Array, "D F"], dtype) -> Float[Array, "*rows F"]:
    """``x @ kernel``, accumulated and returned in ``dtype``.

    On a CPU a single row is multiplied as two half contractions whose products are added. XLA runs the two on two
    cores, where it leaves one core idle for some shapes: [512] by [512, 3072] takes 117 us in place of 196, and no
    shape was more than 10% slower (jax 0.10, 2 cores). With more than one row the same trick loses, up to threefold.
    """
    width = x.shape[-1]
    if _on_cpu() and math.prod(x.shape[:-1]) == 1 and width % 2 == 0:
        halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
        out = jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
        return out.reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


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
