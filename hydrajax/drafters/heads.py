"""One draft head: residual blocks, then an lm head. Medusa and Hydra heads differ only in what they read."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hydrajax.models.layers import declare


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W starts at zero, so the block starts as the identity (medusa 2.1.1)."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        width = x.shape[-1]
        kernel = declare(self, "kernel", (width, width), ("width", "mlp"), nn.initializers.zeros)
        bias = declare(self, "bias", (width,), ("mlp",), nn.initializers.zeros)
        return x + jax.nn.silu(x @ kernel + bias)


class ConditionedBlock(nn.Module):
    """R x + r + SiLU(W x + b), narrowing ``slots`` concatenated vectors to one (hydra 3, DESIGN section 4).

    W and R read the same input, so they are one matmul: ``kernel[:, 0]`` is W, ``kernel[:, 1]`` is R.
    """

    slots: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*rows SD"]) -> Float[Array, "*rows D"]:
        width = x.shape[-1] // self.slots
        kernel = declare(self, "kernel", (x.shape[-1], 2, width), ("width", None, "mlp"), _first_slot_passes)
        bias = declare(self, "bias", (2, width), (None, "mlp"), nn.initializers.zeros)
        both = x @ kernel.reshape(x.shape[-1], -1) + bias.reshape(-1)
        return both[..., width:] + jax.nn.silu(both[..., :width])


def _first_slot_passes(rng, shape, dtype):
    """W = 0 and R = [identity; 0], so that a fresh head starts from the base's hidden state."""
    del rng
    fan_in, _, width = shape
    passing = jnp.eye(fan_in, width, dtype=dtype)
    return jnp.stack([jnp.zeros_like(passing), passing], axis=1)


class Head(nn.Module):
    """A draft head over ``slots`` concatenated vectors of width D: ``n_layers`` blocks and an lm head.

    With ``share_blocks`` every unconditioned block is the same one applied again, as in the released code.
    ``hidden`` and ``logits`` are separate so that a trainer can chunk the vocabulary matmul.
    """

    slots: int
    n_layers: int
    share_blocks: bool
    lm_head_bias: bool
    width: int
    vocab_size: int
    dtype: jnp.dtype

    def setup(self):
        plain = self.n_layers - (self.slots > 1)
        self.blocks = [ResidualBlock(self.dtype) for _ in range(min(plain, 1) if self.share_blocks else plain)]
        if self.slots > 1:
            self.conditioned = ConditionedBlock(self.slots, self.dtype)
        axes = ("width", "vocab")
        self.lm_kernel = declare(self, "lm_kernel", (self.width, self.vocab_size), axes, nn.initializers.normal(0.02))
        if self.lm_head_bias:
            self.lm_bias = declare(self, "lm_bias", (self.vocab_size,), axes[1:], nn.initializers.zeros)

    def hidden(self, x: Float[Array, "*rows SD"]) -> Float[Array, "*rows D"]:
        """The input of the lm head."""
        plain = self.n_layers
        if self.slots > 1:
            x = self.conditioned(x)
            plain -= 1
        for i in range(plain):
            x = self.blocks[0 if self.share_blocks else i](x)
        return x

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits of the token this head predicts."""
        out = jnp.matmul(hidden, self.lm_kernel, preferred_element_type=jnp.float32)
        return out + self.lm_bias.astype(jnp.float32) if self.lm_head_bias else out

    def __call__(self, x: Float[Array, "*rows SD"]) -> Float[Array, "*rows V"]:
        return self.logits(self.hidden(x))
