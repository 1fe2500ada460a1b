"""Latent attention (MLA): all heads' keys and values are products of one latent per token, which the cache keeps.

Tokens attend to a cache by the latents themselves. A head's key is ``W_UK c`` for the latent c, so its score is
``(W_UK^T q) c``, and its output is W_UV of the weighted sum of latents: one key-value head whose values are the first
features of its keys. A text without a cache is expanded to keys and values by head, which costs a third.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax import ops
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, attend, rotate
from hydrajax.models.kv_vectors import KeyValue, rounded, widened
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import declare, declare_kernel, project


class LatentAttention(nn.Module):
    """The attention of one layer (`hydrajax.models.latent_settings.Latent`).

    The kernels of keys and values stay in floats, as they are used by head. ``norm`` makes the norms' modules.
    """

    config: LlamaConfig
    norm: Callable[..., nn.Module]
    dtype: DType
    quantize: str | None = None
    kv_cache: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rope, block_mask, past: Sequence[KVSegment]
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return what attention adds, and ``[latent, rotated key]`` of the T tokens, as a cache stores them."""
        c, s, (batch, n_tokens, width) = self.config, self.config.latent, x.shape
        normal, query_rank = nn.initializers.normal(0.02), s.query_rank or 0
        size = query_rank + s.kept_dim
        inner = project(x, declare_kernel(self, "latents", (width, size), ("width", None)))
        if c.qkv_bias:
            inner = inner + declare(self, "latents_bias", (size,), (None,), nn.initializers.zeros)
        of_queries, latents, key = jnp.split(inner, [query_rank, query_rank + s.rank], axis=-1)
        of_queries = self.norm(name="query_norm")(of_queries) if query_rank else x
        shape = (of_queries.shape[-1], c.n_heads, s.key_dim)
        queries = project(of_queries, declare_kernel(self, "queries", shape, ("width", "heads", None)))
        queries = queries.reshape(batch, n_tokens, c.n_heads, s.key_dim).swapaxes(1, 2)
        plain, rotated = queries[..., : s.nope_dim], rotate(queries[..., s.nope_dim :], rope)
        latents, key = self.norm(name="latent_norm")(latents)[:, None], rotate(key[:, None], rope)
        kept = jnp.concatenate([latents, key], axis=-1)
        if self.kv_cache is not None:
            kept = rounded(kept, self.kv_cache)
        key_up = declare(self, "key_up", (c.n_heads, s.nope_dim, s.rank), ("heads", None, None), normal)
        value_up = declare(self, "value_up", (c.n_heads, s.value_dim, s.rank), ("heads", None, None), normal)

        if past:
            plain = _by_head("hxn,hnr->hxr", plain.swapaxes(1, 2), key_up).swapaxes(1, 2)
            segments = [KVSegment.of((kept,), block_mask), *past]
            found = self._attend(jnp.concatenate([plain, rotated], axis=-1), segments)[..., : s.rank]
            found = _by_head("hxr,hvr->hxv", found, value_up)
        else:
            latents, key = jnp.split(widened(kept, self.dtype), [s.rank], axis=-1)
            keys, values = (
                ops.matmul_transposed(latents[:, 0], kernel.reshape(-1, s.rank), self.dtype)
                .reshape(batch, n_tokens, c.n_heads, -1)
                .swapaxes(1, 2)
                for kernel in (key_up, value_up)
            )
            keys = jnp.concatenate([keys, jnp.broadcast_to(key, (*keys.shape[:3], s.rope_dim))], axis=-1)
            size = max(s.key_dim, s.value_dim)
            queries = jnp.concatenate([plain, rotated], axis=-1)
            queries, keys, values = (
                jnp.pad(y, [(0, 0)] * 3 + [(0, size - y.shape[-1])]) for y in (queries, keys, values)
            )
            found = self._attend(queries, [KVSegment(keys, values, block_mask)])[..., : s.value_dim]
        kernel = declare_kernel(self, "out", (c.n_heads * s.value_dim, width), ("heads", "width"))
        out = project(found.reshape(batch, n_tokens, -1), kernel)
        if c.out_bias:
            out = out + declare(self, "out_bias", (width,), ("width",), nn.initializers.zeros)
        return out, (kept,)

    def _attend(self, queries: Float[Array, "B h T H"], segments: Sequence[KVSegment]) -> Float[Array, "B T h H"]:
        batch, n_heads, n_tokens, size = queries.shape
        scale = self.config.attention_scale * size**0.5  # `attend` multiplies by size ** -0.5
        return attend(queries * jnp.asarray(scale, queries.dtype), segments).reshape(batch, n_tokens, n_heads, size)


def _by_head(spec: str, x: Float[Array, "B T h n"], kernels: Float[Array, "h _ _"]) -> Float[Array, "B T h r"]:
    """Return the product of each head with its kernel, as a matmul with one leading batch axis: a CPU runs no other
    form in bfloat16.
    """
    rows = jnp.moveaxis(x, 2, 0)
    out = ops.contract(spec, rows.reshape(len(rows), -1, x.shape[-1]), kernels, x.dtype)
    return jnp.moveaxis(out.reshape(*rows.shape[:-1], -1), 0, 2)
