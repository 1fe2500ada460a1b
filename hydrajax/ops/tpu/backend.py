"""Operations on a TPU: our Pallas kernels and splash attention where they apply, else XLA's operations in other forms.

A TPU stores the last two axes of an array in tiles, and multiplies a single row on its slower vector unit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.sharded import DATA, MODEL, shard, shards_tokens
from hydrajax.ops.xla import Xla

FUSED_ROWS = 128  # of a fused matmul; with more, XLA copies the parts of the result
TILE_ROWS = 16  # of bfloat16; a multiple of those of float32


class Tpu(Xla):
    """The operations of a TPU."""

    def _matmul_rows(self, x, kernel, dtype, stored):
        if dtype != x.dtype:  # an lm head
            # XLA would relayout its weight, and with several rows compute a draft head's block again for each part of
            # the vocabulary.
            x = jax.lax.optimization_barrier(x)
        return super()._matmul_rows(x, kernel, dtype, stored)

    def _repeats_row(self, x, dtype, stored):
        return True

    def _parts(self, x, kernel, dtype, stored):
        """Multiply in place, as `stored_order` stores the kernel."""
        if kernel.ndim > 2 and x.size // x.shape[-1] > FUSED_ROWS:
            return self._by_section(x, kernel, dtype)
        return self._parts_in_place(x, kernel, dtype, stored)

    def _by_section(self, x, kernel, dtype):
        """Multiply with queries, keys and values, or gate and up, apart, and join the results for callers.

        XLA copies gate and heads out of a fused matmul's result, but removes this concatenation. With x as one axis of
        rows it would relayout queries' kernels, and without the barrier multiply up within down's kernel, which is
        slower.
        """
        parts, heads = kernel.shape[-2], "k" * (kernel.ndim - 3)
        rows, shape = "bt"[3 - x.ndim :], x.shape[:-1]
        if heads and len(shape) == 2 and shape[0] == 1 and shape[1] % FUSED_ROWS == 0:  # to XLA this is one axis
            x = x.reshape(-1, FUSED_ROWS, x.shape[-1])
        spec = f"{rows}d,d{heads}pf->{rows[:-1]}{heads}p{rows[-1]}f"
        sections = jnp.split(kernel, [max(0, parts - 2), parts - 1], axis=-2)
        products = [self.contract(spec, x, section, dtype) for section in sections]
        if not heads:
            products = jax.lax.optimization_barrier(products)
        if len(rows) == 2:
            products = [jnp.moveaxis(product, 0, -3) for product in products]
        products = [
            product.reshape(*product.shape[: len(heads) + 1], *shape, product.shape[-1]) for product in products
        ]
        return jnp.concatenate(products, axis=len(heads))

    def split_heads(self, qkv, places):
        """Split the heads, which are already apart."""
        return [part.transpose(2, 0, 1, 3, 4) for part in jnp.split(qkv, places, axis=1)]

    def stored_order(self, shape, dtype):
        """Return the order with D next to F: a fused kernel as it is declared would be relaid out in every step."""
        last = len(shape) - 1
        return None if last < 2 else (*reversed(range(last)), last)

    def trained_order(self, shape):
        """Return the order with D last, as the gradient's matmul writes it: XLA would relayout kernel and moments
        before and after each step.
        """
        last = len(shape) - 1
        return None if last < 2 else (*reversed(range(1, last)), last, 0)

    def tree_kernel(self, queries, n_kv):
        if not trace.has_mosaic():
            return None
        from hydrajax.ops.tpu import tree_attention

        _, n_heads, n_tokens, head_dim = queries.shape
        fits = tree_attention.fits(n_heads // n_kv * n_tokens, n_tokens, head_dim, queries.dtype)
        return tree_attention if fits else None

    def text_kernel(self, queries):
        from hydrajax.ops.tpu import text_attention

        return text_attention.attend if text_attention.fits(queries) and trace.has_mosaic() else None

    text_kernel_with_sinks = text_kernel

    def rotate_halves(self, x, cos, sin):
        """Rotate by a permutation's matmul: exact, as each sum has one term, and faster than shifts of lanes. An axis
        of halves would be stored in tiles that are a quarter full.
        """
        wide = x.astype(jnp.float32)
        cos, sin = (t.reshape(*t.shape[:-2], -1) for t in (cos, sin))
        exchange = np.roll(np.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, axis=1)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        exchanged = jnp.matmul(x, exchange, precision=precision, preferred_element_type=jnp.float32)
        return wide * cos + exchanged * sin

    def argmax(self, logits):
        """Return XLA's argmax. The barrier keeps it out of the lm head's matmul, whose tiles it would make smaller."""
        return jnp.argmax(jax.lax.optimization_barrier(logits), axis=-1).astype(jnp.int32)

    def _tokens(self, block, index):
        """Return some tokens by a matmul with ones and zeros, which is exact. XLA would copy the block for a gather."""
        if not jnp.issubdtype(block.dtype, jnp.floating):
            return super()._tokens(block, index)
        chosen = jax.nn.one_hot(index, block.shape[2], dtype=block.dtype)
        precision = jax.lax.Precision.HIGHEST if block.dtype == jnp.float32 else None
        return jnp.einsum("brt,bktd->bkrd", chosen, block, precision=precision)

    def dropout_mask(self, keep, sharding):
        """Return a mask that is read from memory: otherwise each device draws all of it, in every kernel that reads a
        matmul's input.
        """
        if keep.ndim != 3:
            return keep
        if sharding and shards_tokens(keep):  # a byte for each element is little where devices share them
            return jax.lax.optimization_barrier(sharding(keep))
        return _as_bits(keep)

    def _slots_of_block(self):
        """Return a tile's rows. A cache of another number would be relaid out before and after each loop."""
        return TILE_ROWS

    def rows_of_token(self, tokens):
        """Return a tile's rows for one token: a single row would be copied into another layout before and after most
        kernels. Several devices would exchange all rows.
        """
        return TILE_ROWS if tokens == 1 and trace.on_one_device() else 1

    def compiler_options(self):
        """Give a matmul's kernel 32 MB of vector memory in place of 16, for larger tiles of the weight. Programs of
        several devices keep 16, and with it more room to fetch the next weights into.
        """
        sets = trace.platform().sets_vector_memory and trace.platform().devices == 1
        return {trace.TPU_VECTOR_MEMORY: "32768"} if sets else None


def _as_bits(keep: Bool[Array, "B T D"]) -> Bool[Array, "B T D"]:
    """Return the mask as read from a bit for each element, of which every device of a mesh draws a part."""
    drawn = jnp.packbits(shard(keep, DATA, None, MODEL), axis=1)
    bits = jax.lax.optimization_barrier(shard(drawn, DATA))
    return jnp.unpackbits(bits, axis=1, count=keep.shape[1]).astype(bool)
