"""One draft head: residual blocks, then an lm head. Medusa and Hydra heads differ only in what they read."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hydrajax.drafters.drafter import Trainable, last_observed
from hydrajax.errors import HydrajaxError
from hydrajax.models.layers import declare
from hydrajax.models.weights import project


def check_dropout(rate: float) -> None:
    if not 0 <= rate < 1:
        raise HydrajaxError(f"dropout: must be at least 0 and below 1, found {rate}")


def drop(x: Float[Array, "*rows D"], rate: float, rng: Array | None) -> Float[Array, "*rows D"]:
    """Inverted dropout: the expectation of every element stays. Without a key, ``x`` itself."""
    if rng is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(rng, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W starts at zero, so the block starts as the identity (medusa 2.1.1)."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        width = x.shape[-1]
        kernel = declare(self, "kernel", (width, width), ("width", "mlp"), nn.initializers.zeros)
        bias = declare(self, "bias", (width,), ("mlp",), nn.initializers.zeros)
        return x + jax.nn.silu(project(x, kernel) + bias)


class ConditionedBlock(nn.Module):
    """R x + r + SiLU(W x + b) over concatenated vectors, narrowing them to one (hydra 3, DESIGN section 4).

    W and R read the same input, so they are one matmul: ``kernel[:, 0]`` is W, ``kernel[:, 1]`` is R. The input is
    [h, E(root)] and then the embeddings of ``path_length`` tokens. Only the latter differ between the paths of a
    tree, so the two parts have kernels of their own and the shared one is multiplied once per tree.
    """

    path_length: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, shared: Float[Array, "*rows 2D"], path: Float[Array, "*paths kD"] | None
    ) -> Float[Array, "*paths D"]:
        width = shared.shape[-1] // 2
        axes = ("width", None, "mlp")
        kernel = declare(self, "shared_kernel", (2 * width, 2, width), axes, _hidden_state_passes)
        bias = declare(self, "bias", (2, width), axes[1:], nn.initializers.zeros)
        both = project(shared, kernel) + bias.reshape(-1)
        if self.path_length:
            rows = self.path_length * width
            kernel = declare(self, "path_kernel", (rows, 2, width), axes, nn.initializers.zeros)
            both = both + project(path, kernel)
        return both[..., width:] + jax.nn.silu(both[..., :width])


def _hidden_state_passes(rng, shape, dtype):
    """W = 0 and R = [identity; 0], so that a fresh head starts from the base's hidden state."""
    del rng
    fan_in, _, width = shape
    passing = jnp.eye(fan_in, width, dtype=dtype)
    return jnp.stack([jnp.zeros_like(passing), passing], axis=1)


class Head(nn.Module):
    """A draft head: ``n_layers`` blocks and an lm head.

    path_length: None for a head that reads the hidden state alone (Medusa), else how many tokens after the root its
    first, conditioned block reads (Hydra's head k: k). With ``share_blocks`` every unconditioned block is the same one
    applied again, as in the released code. ``hidden`` and ``logits`` are separate so that a trainer can chunk the
    vocabulary matmul. ``dropout`` precedes every block and the lm head (DESIGN section 4), and only where a key is
    given: a shared block meets a new mask each time it is applied.
    """

    path_length: int | None
    n_layers: int
    share_blocks: bool
    lm_head_bias: bool
    width: int
    vocab_size: int
    dtype: jnp.dtype
    dropout: float = 0.0

    @property
    def n_plain(self) -> int:
        """Applications of unconditioned blocks."""
        return self.n_layers - (self.path_length is not None)

    def setup(self):
        distinct = min(self.n_plain, 1) if self.share_blocks else self.n_plain
        self.blocks = [ResidualBlock(self.dtype) for _ in range(distinct)]
        if self.path_length is not None:
            self.conditioned = ConditionedBlock(self.path_length, self.dtype)
        axes = ("width", "vocab")
        self.lm_kernel = declare(self, "lm_kernel", (self.width, self.vocab_size), axes, nn.initializers.normal(0.02))
        if self.lm_head_bias:
            self.lm_bias = declare(self, "lm_bias", (self.vocab_size,), axes[1:], nn.initializers.zeros)

    def hidden(
        self,
        x: Float[Array, "*rows D_or_2D"],
        path: Float[Array, "*paths kD"] | None = None,
        rng: Array | None = None,
    ) -> Float[Array, "*paths D"]:
        """The input of the lm head (before its dropout). ``x`` is h_t, or [h_t, E(root)] for a conditioned head."""

        def dropped(x, place):
            return drop(x, self.dropout, None if rng is None else jax.random.fold_in(rng, place))

        if self.path_length is not None:
            x = self.conditioned(dropped(x, 0), dropped(path, 1) if self.path_length else None)
        for i in range(self.n_plain):
            x = self.blocks[0 if self.share_blocks else i](dropped(x, 2 + i))
        return x

    def logits(self, hidden: Float[Array, "*rows D"], rng: Array | None = None) -> Float[Array, "*rows V"]:
        """Float32 logits of the token this head predicts."""
        out = project(drop(hidden, self.dropout, rng), self.lm_kernel, jnp.float32)
        return out + self.lm_bias.astype(jnp.float32) if self.lm_head_bias else out

    def __call__(
        self, x: Float[Array, "*rows D_or_2D"], path: Float[Array, "*paths kD"] | None = None
    ) -> Float[Array, "*paths V"]:
        return self.logits(self.hidden(x, path))


class HeadStack(Trainable):
    """What Medusa and Hydra share: parameters ``{"head_0": ...}``, K independent heads and their two training halves.

    A subclass is a frozen dataclass with ``n_heads``, ``width``, ``dtype`` and ``dropout``; ``head(k)`` says what head
    k is and ``teacher_inputs`` what it reads.
    """

    def __post_init__(self):
        check_dropout(self.dropout)

    @property
    def depth(self) -> int:
        return self.n_heads

    def init_boxed(self, rng, base):
        """Every lm head starts as a copy of the base's (medusa 2.1.1)."""
        params = {}
        for k in range(self.n_heads):
            head = self.head(k)
            conditioned = head.path_length is not None
            example = jnp.zeros((1, head.width * (1 + conditioned)), head.dtype)
            path = jnp.zeros((1, head.width * (head.path_length or 0)), head.dtype)
            fresh = dict(head.init(jax.random.fold_in(rng, k), example, path)["params"])
            fresh["lm_kernel"] = fresh["lm_kernel"].replace_boxed(base.head_kernel().astype(head.dtype))
            params[f"head_{k}"] = fresh
        return params

    def init_state(self, batch, slots):
        return jnp.zeros((batch, self.width), self.dtype)

    def observe(self, params, state, features, tokens, counts, base):
        return last_observed(features, counts)

    def teacher_hidden(self, params, features, tokens, base, rng=None, positions=None, mask=None):
        inputs = self.teacher_inputs(features, tokens, base)
        keys = [None if rng is None else jax.random.fold_in(rng, k) for k in range(self.n_heads)]
        return tuple(
            self.head(k).apply({"params": params[f"head_{k}"]}, *inputs[k], rng=keys[k], method="hidden")
            for k in range(self.n_heads)
        )

    def head_logits(self, params, k, hidden, base, rng=None):
        return self.head(k).apply({"params": params[f"head_{k}"]}, hidden, rng, method="logits")
