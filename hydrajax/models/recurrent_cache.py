"""The cache of a recurrent layer: a state and the last inputs of its convolution."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax import ops
from hydrajax.models.arrays import Array
from hydrajax.models.recurrent_settings import Recurrent
from hydrajax.ops.sharded import DATA, MODEL, shard


class PathNodes(NamedTuple):
    """The nodes of a tree in a recurrent layer, until some are accepted.

    Attributes:
        inputs: ``[B, G, T, C]`` of the convolution.
        keys: ``[B, G, T, d_k]``; None, as the others, for a layer that has a convolution alone.
        written: ``[B, h, T, d_v]`` u of each node.
        decay: ``[B, h, T]`` α of each node.
    """

    inputs: Float[Array, "B G T C"]
    keys: Float[Array, "B G T k"] | None = None
    written: Float[Array, "B h T v"] | None = None
    decay: Float[Array, "B h T"] | None = None


class RecurrentCache(NamedTuple):
    """The committed text of each sequence in one recurrent layer.

    Attributes:
        inputs: ``[B, G, K - 1, C]`` the convolution's last inputs, the latest last.
        state: float32 ``[B, h, d_v, d_k]``; None for a layer that has a convolution alone.
    """

    inputs: Float[Array, "B G K1 C"]
    state: Float[Array, "B h v k"] | None = None

    @classmethod
    def empty(cls, settings: Recurrent, batch: int, dtype) -> RecurrentCache:
        """Return the cache of empty texts; on a mesh, sharded as keys and values are."""
        inputs = jnp.zeros((batch, *settings.inputs_shape), dtype)
        if settings.state_shape is None:
            return cls(shard(inputs, DATA, MODEL))
        state = jnp.zeros((batch, *settings.state_shape), jnp.float32)
        return cls(shard(inputs, DATA, MODEL), shard(state, DATA, MODEL))

    def after(
        self, block: RecurrentCache | PathNodes, counts: Int[Array, " B"], path: Int[Array, "B R"] | None
    ) -> RecurrentCache:
        """Return the cache after ``counts[b]`` more tokens of each sequence.

        Args:
            block: What the layer returned for the tokens: the cache after a text, whose mask had these counts, or
                nodes.
            counts: int32 ``[B]``, 0 for a sequence that stays as it is.
            path: The nodes, in order; None for the first ones.
        """
        if isinstance(block, RecurrentCache):
            return block
        if path is None:
            path = jnp.broadcast_to(jnp.arange(block.inputs.shape[2]), (len(counts), block.inputs.shape[2]))
        joined = jnp.concatenate([self.inputs, _along(block.inputs, path).astype(self.inputs.dtype)], axis=2)
        inputs = _along(joined, counts[:, None] + jnp.arange(self.inputs.shape[2]))
        if self.state is None:
            return RecurrentCache(inputs)
        if kernel := ops.here().path_kernel(*block.keys.shape[2:]):
            given = self.state, block.keys, block.written, block.decay, path, counts
            return RecurrentCache(inputs, kernel.advance(*given))
        keys, written, decay = (_along(x, path) for x in block[1:])
        accepted = (jnp.arange(decay.shape[2]) < counts[:, None])[:, None]
        decay = jnp.where(accepted, decay, 1.0)
        from_here = jnp.flip(jnp.cumprod(jnp.flip(decay, axis=-1), axis=-1), axis=-1)
        after = jnp.concatenate([from_here[..., 1:], jnp.ones_like(from_here[..., :1])], axis=-1)
        weights = jnp.where(accepted, after, 0.0)
        return RecurrentCache(inputs, self.folded(self.state, keys, written, weights, from_here[..., 0]))

    @staticmethod
    def folded(state, keys, written, weights: Float[Array, "B h T"], kept: Float[Array, "B h"]) -> Array:
        """Return ``kept S + Σ_j weights_j u_j k_jᵀ`` of each head."""
        batch, groups = keys.shape[:2]
        weighted = (written * weights[..., None]).reshape(batch, groups, -1, *written.shape[2:])
        added = jnp.einsum("bgrtv,bgtk->bgrvk", weighted, keys, precision=jax.lax.Precision.HIGHEST)
        return kept[..., None, None] * state + added.reshape(state.shape)


def _along(x: Array, index: Int[Array, "B R"]) -> Array:
    """Return some tokens of each sequence from an array ``[B, heads, T, ...]``."""
    index = index[:, None].reshape(index.shape[0], 1, -1, *[1] * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2)
