"""The frozen base model: a LLaMA-family decoder as a pure Flax module; what differs in a family is in its config."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hydrajax.models.cache import Block, KVCache
from hydrajax.models.config import LlamaConfig
from hydrajax.models.layers import DecoderLayer, RMSNorm, declare, declare_kernel, rope_table
from hydrajax.models.weights import Int8, project


class Forward(NamedTuple):
    """What one forward pass over T tokens returns.

    hidden:   ``[B, T, D]`` after the final norm; the lm head and (usually) the drafter read it.
    features: ``[B, T, D]`` what the drafter reads: ``hidden``, or the input of an earlier layer.
    block:    keys and values of the T tokens, layer by layer, not yet in any cache.
    """

    hidden: Float[Array, "B T D"]
    features: Float[Array, "B T D"]
    block: Block


class Llama(nn.Module):
    """LLaMA: RMSNorm, rotary grouped-query attention, SwiGLU, tied or untied lm head.

    Parameters and computation share ``dtype``; norms, softmax, rotary angles and logits are float32. With ``int8``
    the matmuls' weights are `hydrajax.models.weights.Int8` (not the embedding, nor an lm head tied to it).
    """

    config: LlamaConfig
    dtype: jnp.dtype = jnp.float32
    int8: bool = False

    def setup(self):
        c = self.config
        normal = nn.initializers.normal(0.02)
        self.embedding = declare(self, "embedding", (c.vocab_size, c.width), ("vocab", "width"), normal)
        self.layers = [DecoderLayer(c, self.dtype, self.int8) for _ in range(c.n_layers)]
        self.norm = RMSNorm(c.norm_eps, self.dtype)
        if not c.tied_lm_head:
            self.lm_head = declare_kernel(self, "lm_head", (c.width, c.vocab_size), ("width", "vocab"))

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Raw input embeddings E(x), the ones Hydra heads read (hydra section 3)."""
        return jnp.take(self.embedding, tokens, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 next-token logits from post-norm hidden states."""
        return project(hidden, self._head_kernel(), jnp.float32)

    def head_kernel(self) -> Float[Array, "D V"]:
        """The lm head as one float array."""
        kernel = self._head_kernel()
        return kernel.dequantized().astype(self.dtype) if isinstance(kernel, Int8) else kernel

    def _head_kernel(self) -> Array | Int8:
        return self.embedding.T if self.config.tied_lm_head else self.lm_head

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        block_mask: np.ndarray,
        cache: KVCache | None = None,
        feature_offset: int = 0,
    ) -> Forward:
        """Run T tokens at ``positions`` through the model over an optional cache.

        ``block_mask`` is a static bool ``[T, T]``: which fed tokens see which (causal or tree). Cached tokens are all
        visible up to each row's length. ``feature_offset`` 0 gives the drafter the post-norm output, n > 0 the input
        of the n-th layer from the end (`hidden_state_offset` in the released Hydra code).
        """
        x = self.embed(tokens)
        rope = rope_table(self.config, positions)
        lengths = None if cache is None else cache.lengths
        window, first_seen = self.config.sliding_window, None
        if window is not None:
            first_seen = positions - window + 1
            block_mask = block_mask & (positions[:, None, :] >= first_seen[:, :, None])[:, None, None]
        inputs, block = [], []
        for i, layer in enumerate(self.layers):
            inputs.append(x)
            x, key_value = layer(x, rope, block_mask, None if cache is None else cache.layers[i], lengths, first_seen)
            block.append(key_value)
        hidden = self.norm(x)
        features = hidden if feature_offset == 0 else inputs[-feature_offset]
        return Forward(hidden, features, tuple(block))


def init_boxed(module: nn.Module, rng: Array):
    """Random parameters of a `Llama` with their logical axes attached (`flax.core.meta` boxes)."""
    position = jnp.zeros((1, 1), jnp.int32)
    return module.init(rng, position, position, np.ones((1, 1), bool))["params"]


def init_base(model: Llama, rng: Array) -> dict:
    """Random base parameters (normal, std 0.02) as a plain nested dict of arrays."""
    return nn.unbox(init_boxed(model, rng))


def abstract_base(model: Llama) -> dict:
    """Boxed `ShapeDtypeStruct` leaves: shapes, dtypes and logical axes of the base, nothing allocated."""
    return jax.eval_shape(lambda rng: init_boxed(model, rng), jax.random.key(0))
