"""The Mamba-2 layer in place of attention (arXiv 2405.21060; Granite 4, Nemotron-H)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.models.arrays import Array, DType
from hydrajax.models.recurrence import Order, Tokens, convolve, heads_of, run, square_sum, stored
from hydrajax.models.recurrent_cache import PathNodes, RecurrentCache
from hydrajax.models.recurrent_settings import Mamba2
from hydrajax.models.weights import declare, declare_kernel, project, project_parts


class Mamba2Layer(nn.Module):
    """A state per head that decays by its time step, and a norm of the gated outputs of each group of heads.

    The projection of time steps stays in float: it decides, and is small. Kernels keep the group as an axis of its own,
    with its gates, values, B and C side by side, so that they can be sharded by groups.
    """

    settings: Mamba2
    dtype: DType
    quantize: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it; an adapter does not reach states

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], order: Order, past: RecurrentCache
    ) -> tuple[Float[Array, "B T D"], RecurrentCache | PathNodes]:
        """Return what the layer adds, and what its cache takes in of these tokens."""
        s, (batch, n_tokens, width), normal = self.settings, x.shape, nn.initializers.normal(0.02)
        zeros, ones = nn.initializers.zeros, nn.initializers.ones
        features, channels, by_group = s.heads_per_group * s.head_dim, s.inputs_shape[-1], ("kv_heads", None)
        heads = (s.groups, s.heads_per_group)
        kernel = declare_kernel(self, "inputs", (width, s.groups, features + channels), ("width", *by_group))
        steps = declare(self, "steps", (width, *heads), ("width", *by_group), normal)
        conv = declare(self, "conv", (s.groups, channels, s.kernel), (*by_group, None), normal)
        conv_bias = declare(self, "conv_bias", (s.groups, channels), by_group, zeros) if s.conv_bias else None
        log_rate = declare(self, "log_rate", heads, by_group, zeros)
        step_bias = declare(self, "step_bias", heads, by_group, ones)
        skip = declare(self, "skip", heads, by_group, ones)
        scale = declare(self, "norm_scale", (s.groups, features), by_group, ones)
        out_kernel = declare_kernel(self, "output", (s.heads * s.head_dim, width), ("heads", "width"))

        gate, inputs = jnp.split(jnp.moveaxis(project_parts(x, kernel), 0, 1), [features], axis=-1)
        mixed = convolve(inputs, past.inputs, conv, order)
        mixed = jax.nn.silu(mixed if conv_bias is None else mixed + conv_bias[:, None]).astype(jnp.float32)
        values, keys, queries = jnp.split(mixed, [features, features + s.state_size], axis=-1)
        values = heads_of(values, s.heads_per_group)
        step = jnp.moveaxis(project_parts(x, steps), 0, 1).astype(jnp.float32) + step_bias[:, None]
        step = jnp.moveaxis(jnp.clip(jax.nn.softplus(step), *s.step_limit), -1, 2)
        log_decay = -jnp.exp(log_rate.astype(jnp.float32))[..., None] * step
        outputs, kept = run(Tokens(queries, keys, step[..., None] * values, log_decay), order, past.state)
        outputs = outputs + skip[:, :, None, None] * values
        outputs = jnp.moveaxis(outputs, 2, 3).reshape(batch, s.groups, n_tokens, features)
        gated = outputs * jax.nn.silu(gate.astype(jnp.float32))
        normed = gated * jax.lax.rsqrt(square_sum(gated) / features + s.norm_eps)
        normed = (scale[:, None] * normed).astype(self.dtype)
        return project(jnp.moveaxis(normed, 1, 2).reshape(batch, n_tokens, -1), out_kernel), stored(
            inputs, past, order, kept
        )
