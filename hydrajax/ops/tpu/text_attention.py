"""Attention within a prompt on TPUs: JAX's splash attention, which keeps scores on the chip.

Blocks of keys after the queries, or before a sliding window, are neither fetched nor computed. Prompts of different
lengths need nothing more: the padding comes after the text, so a causal mask hides it.

Alternatives in `jax.experimental.pallas.ops.tpu`: flash attention has neither windows nor grouped heads, and ragged
paged attention reads keys and values from pages and has no gradient.

Compiled for described TPUs and compared with NumPy in Pallas's interpreter; it has not run on a TPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Float

from hydrajax.models.arrays import Array

LANES = 128  # a block is a multiple
MOST_QUERIES = 512  # of a block, and as many keys


def fits(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether the kernel applies to these queries: float32 would be rounded to bfloat16."""
    return queries.dtype == jnp.bfloat16 and queries.shape[3] in (64, 128, 256)


def attend(
    queries: Float[Array, "B n_heads T H"],
    keys: Float[Array, "B kv T H"],
    values: Float[Array, "B kv T H"],
    window: int | None,
    sinks: Float[Array, " n_heads"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T width"]:
    """Attend from each token to itself and those before it, or to the last ``window`` of these, and to the sinks."""
    batch, n_heads, n_tokens, head_dim = queries.shape
    padded = -(-n_tokens // LANES) * LANES
    inputs = (jnp.pad(x, ((0, 0), (0, 0), (0, padded - n_tokens), (0, 0))) for x in (queries, keys, values))
    queries, keys, values = inputs
    size = max(size for size in range(LANES, MOST_QUERIES + 1, LANES) if padded % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = splash_attention_kernel.BlockSizes(**{f"block_{name}": size for name in names})
    left = None if window is None or window >= n_tokens else window - 1
    mask = splash_attention_mask.LocalMask((padded, padded), (left, 0), 0)
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * n_heads), block_sizes=sizes, interpret=interpret
    )
    scaled = queries * jnp.asarray(head_dim**-0.5, queries.dtype)
    out = jax.vmap(lambda *text: kernel(*text, sinks=sinks))(scaled, keys, values)[:, :, :n_tokens]
    return out.swapaxes(1, 2).reshape(batch, n_tokens, -1)
